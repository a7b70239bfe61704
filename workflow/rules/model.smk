# The original model as a Hugging Face folder.


rule retrieve_model:
    input:
        code=code("yardstick.cli.build_model"),
        local=local_files,
    output:
        "data/models/{model}/manifest.json",
    log:
        "logs/{model}/retrieve_model.log",
    benchmark:
        "benchmarks/{model}/retrieve_model.tsv"
    threads: 1
    resources:
        mem_mb=2500,
    params:
        recipe=lambda w: as_json(EXPERIMENT.model_recipe(w.model)),
        files=lambda w: stamps(local_files(w)),
    message:
        "Fetching the model {wildcards.model}"
    shell:
        "python -m yardstick.cli.build_model --recipe {params.recipe:q} --downloads data/downloads"
        " --output {output} --log {log}"
