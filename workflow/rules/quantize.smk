# Our own variants: packed int4 checkpoints, one for each entry of `variants`.


rule quantize_variant:
    input:
        code=method_code,
        model="data/models/{model}/manifest.json",
        calibration=calibration_sequences,
        start=start_checkpoints,
    output:
        index="results/quality/{model}/{variant}/checkpoint/model.safetensors.index.json",
        record="results/quality/{model}/{variant}/quantize.json",
    log:
        "logs/{model}/{variant}/quantize.log",
    benchmark:
        "benchmarks/{model}/{variant}/quantize.tsv"
    threads: workflow.cores
    resources:
        gpu=1,
        mem_mb=lambda w: 3500 if start_checkpoints(w) else 2500,
    params:
        recipe=lambda w: as_json(EXPERIMENT.variants[w.variant]),
        calibration=lambda w: " ".join(f"--calibration {path}" for path in calibration_sequences(w)),
        start=lambda w: " ".join(f"--start {path}" for path in start_checkpoints(w)),
    message:
        "Quantizing {wildcards.model} as {wildcards.variant}"
    shell:
        "python -m yardstick.cli.quantize --recipe {params.recipe:q} --model {input.model} {params.calibration}"
        " {params.start} --output {output.index} --record {output.record} --log {log}"
