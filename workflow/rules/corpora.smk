# Token windows to measure on, and sequences to calibrate on.


rule build_corpora:
    input:
        code=code("yardstick.cli.build_corpora"),
        model="data/models/{model}/manifest.json",
        pin=pinned_manifest,
        texts=text_files,
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
        pin=lambda w: " ".join(f"--pin {pin}" for pin in pinned_manifest(w)),
    message:
        "Building the corpora for {wildcards.model}"
    shell:
        "python -m yardstick.cli.build_corpora --recipe {params.recipe:q} --model {input.model} {params.pin}"
        " --downloads data/downloads --chunks {output.chunks} --calibration {output.calibration}"
        " --manifest {output.manifest} --log {log}"
