# Rivals: the same original in other people's formats, made here by their own quantizers or fetched as published.


rule build_imatrix:
    input:
        code=code("yardstick.cli.build_imatrix"),
        model="data/models/{model}/manifest.json",
        calibration="data/quality/{model}/calib.npz",
    output:
        "results/quality/{model}/reference/imatrix.gguf",
    log:
        "logs/{model}/build_imatrix.log",
    benchmark:
        "benchmarks/{model}/build_imatrix.tsv"
    threads: workflow.cores
    resources:
        gpu=1,
        mem_mb=2500,
    params:
        recipe=as_json({"batch_chunks": 4}),
    message:
        "Computing the importance matrix of {wildcards.model}"
    shell:
        "python -m yardstick.cli.build_imatrix --recipe {params.recipe:q} --model {input.model}"
        " --calibration {input.calibration} --output {output} --log {log}"


rule build_gguf:
    input:
        code=code("yardstick.cli.build_gguf"),
        model="data/models/{model}/manifest.json",
        imatrix=importance_matrix,
    output:
        checkpoint="results/quality/{model}/{rival}/checkpoint/model.gguf",
        record="results/quality/{model}/{rival}/quantize.json",
    log:
        "logs/{model}/{rival}/build_gguf.log",
    benchmark:
        "benchmarks/{model}/{rival}/build_gguf.tsv"
    wildcard_constraints:
        rival=closed_list(name for name, rival in EXPERIMENT.rivals.items() if rival["kind"] == "gguf"),
    threads: workflow.cores
    resources:
        mem_mb=2500,
    params:
        recipe=lambda w: as_json(EXPERIMENT.recipe(w.rival)),
        imatrix=lambda w: " ".join(f"--imatrix {path}" for path in importance_matrix(w)),
    message:
        "Making the GGUF rival {wildcards.rival} of {wildcards.model}"
    shell:
        "python -m yardstick.cli.build_gguf --recipe {params.recipe:q} --model {input.model} {params.imatrix}"
        " --output {output.checkpoint} --record {output.record} --log {log}"


rule retrieve_rival:
    input:
        code=code("yardstick.cli.retrieve_rival"),
        local=local_rival,
    output:
        manifest="results/quality/{model}/{rival}/checkpoint/manifest.json",
        record="results/quality/{model}/{rival}/quantize.json",
    log:
        "logs/{model}/{rival}/retrieve_rival.log",
    benchmark:
        "benchmarks/{model}/{rival}/retrieve_rival.tsv"
    wildcard_constraints:
        rival=closed_list(name for name, rival in EXPERIMENT.rivals.items() if rival["kind"] in ("hub", "local")),
    threads: 1
    resources:
        mem_mb=1000,
    params:
        recipe=lambda w: as_json(EXPERIMENT.recipe(w.rival)),
    message:
        "Fetching the rival {wildcards.rival} of {wildcards.model}"
    shell:
        "python -m yardstick.cli.retrieve_rival --recipe {params.recipe:q} --name {wildcards.rival}"
        " --output {output.manifest} --record {output.record} --log {log}"
