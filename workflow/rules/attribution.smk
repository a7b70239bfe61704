# Where in the model a candidate's loss comes from.


rule attribute_candidate:
    input:
        code=attribution_code,
        model="data/models/{model}/manifest.json",
        checkpoint=checkpoint,
        content=checkpoint_content,
        chunks="data/quality/{model}/chunks.npz",
        corpora="data/quality/{model}/manifest.json",
    output:
        "results/quality/{model}/{candidate}/attribution.json",
    log:
        "logs/{model}/{candidate}/attribute.log",
    benchmark:
        "benchmarks/{model}/{candidate}/attribute.tsv"
    wildcard_constraints:
        candidate=closed_list([*EXPERIMENT.variants, *EXPERIMENT.rivals]),
    priority: 1  # a fetched rival is deleted when it has been measured and told apart
    threads: workflow.cores
    resources:
        gpu=1,
        mem_mb=2500,
    params:
        recipe=lambda w: as_json(attribution_params(w)),
    message:
        "Telling the loss of {wildcards.candidate} of {wildcards.model} apart by module"
    shell:
        "python -m yardstick.cli.attribute --recipe {params.recipe:q} --name {wildcards.candidate}"
        " --model {input.model} --checkpoint {input.checkpoint} --chunks {input.chunks} --corpora {input.corpora}"
        " --output {output} --log {log}"


rule plot_attribution:
    input:
        code=code("yardstick.cli.plot_attribution"),
        attribution="results/quality/{model}/{candidate}/attribution.json",
    output:
        report(
            "results/quality/plots/{model}/attribution-{candidate}.png",
            caption="../report/attribution.rst",
            category="Attribution",
        ),
    log:
        "logs/{model}/{candidate}/plot_attribution.log",
    benchmark:
        "benchmarks/{model}/{candidate}/plot_attribution.tsv"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        recipe=as_json({}),
    message:
        "Plotting the attribution of {wildcards.candidate} of {wildcards.model}"
    shell:
        "python -m yardstick.cli.plot_attribution --recipe {params.recipe:q} --attribution {input.attribution}"
        " --output {output} --log {log}"
