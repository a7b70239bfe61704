# Token windows to measure on, and sequences to calibrate on.


rule generate_text:
    input:
        code=code("yardstick.cli.generate_text"),
        model="data/models/{model}/manifest.json",
    output:
        "data/quality/{model}/generated.npz",
    log:
        "logs/{model}/generate_text.log",
    benchmark:
        "benchmarks/{model}/generate_text.tsv"
    threads: workflow.cores
    resources:
        gpu=1,
        mem_mb=2500,
    params:
        recipe=as_json(EXPERIMENT.generation_recipe()),
    message:
        "{wildcards.model} writes text of its own"
    shell:
        "python -m yardstick.cli.generate_text --recipe {params.recipe:q} --model {input.model} --output {output}"
        " --log {log}"


rule build_corpora:
    input:
        code=code("yardstick.cli.build_corpora"),
        model="data/models/{model}/manifest.json",
        pin=pinned_manifest,
        texts=text_files,
        generated=own_text,
    output:
        chunks="data/quality/{model}/chunks.npz",
        calibration="data/quality/{model}/calib.npz",
        manifest="data/quality/{model}/manifest.json",
    log:
        "logs/{model}/build_corpora.log",
    benchmark:
        "benchmarks/{model}/build_corpora.tsv"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        recipe=as_json(EXPERIMENT.config["corpora"]),
        stamps=lambda w: stamps(text_files(w)),
        pin=lambda w: " ".join(f"--pin {pin}" for pin in pinned_manifest(w)),
        generated=lambda w: " ".join(f"--generated {path}" for path in own_text(w)),
    message:
        "Building the corpora for {wildcards.model}"
    shell:
        "python -m yardstick.cli.build_corpora --recipe {params.recipe:q} --model {input.model} {params.pin}"
        " {params.generated}"
        " --downloads data/downloads --chunks {output.chunks} --calibration {output.calibration}"
        " --manifest {output.manifest} --log {log}"
