# The original model's final hidden states on the evaluation windows.


rule build_reference:
    input:
        code=code("yardstick.cli.build_reference"),
        model="data/models/{model}/manifest.json",
        chunks="data/quality/{model}/chunks.npz",
        corpora="data/quality/{model}/manifest.json",
    output:
        manifest="results/quality/{model}/reference/manifest.json",
        states="results/quality/{model}/reference/states.safetensors",
    log:
        "logs/{model}/build_reference.log",
    benchmark:
        "benchmarks/{model}/build_reference.tsv"
    threads: workflow.cores
    resources:
        gpu=1,
        mem_mb=2500,
    params:
        recipe=as_json({k: EXPERIMENT.config["evaluation"][k] for k in ("batch_chunks", "dtype")}),
    message:
        "Running the original {wildcards.model}"
    shell:
        "python -m yardstick.cli.build_reference --recipe {params.recipe:q} --model {input.model}"
        " --chunks {input.chunks} --corpora {input.corpora} --output {output.manifest} --log {log}"
