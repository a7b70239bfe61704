# Every candidate through the same forward: positions first, summaries later.


rule evaluate_candidate:
    input:
        code=evaluation_code,
        model="data/models/{model}/manifest.json",
        checkpoint=checkpoint,
        content=checkpoint_content,
        head=head_checkpoint,
        head_content=head_content,
        chunks="data/quality/{model}/chunks.npz",
        corpora="data/quality/{model}/manifest.json",
        reference="results/quality/{model}/reference/manifest.json",
        states="results/quality/{model}/reference/states.safetensors",
    output:
        positions="results/quality/{model}/{candidate}/positions.parquet",
        evaluation="results/quality/{model}/{candidate}/evaluation.json",
    log:
        "logs/{model}/{candidate}/evaluate.log",
    benchmark:
        "benchmarks/{model}/{candidate}/evaluate.tsv"
    priority: 1  # before anything else is made or fetched: a row as soon as it can be had, a download off the disk
    threads: workflow.cores
    resources:
        gpu=1,
        mem_mb=2500,
    params:
        recipe=lambda w: as_json(evaluation_params(w)),
        checkpoint=lambda w: " ".join(f"--checkpoint {path}" for path in checkpoint(w)),
        mixing=mixing,
    message:
        "Measuring {wildcards.candidate} of {wildcards.model}"
    shell:
        "python -m yardstick.cli.evaluate --recipe {params.recipe:q} --name {wildcards.candidate}"
        " --model {input.model} {params.checkpoint} {params.mixing} --chunks {input.chunks} --corpora {input.corpora}"
        " --reference {input.reference} --positions {output.positions} --output {output.evaluation} --log {log}"


rule summarize_candidate:
    input:
        code=code("yardstick.cli.summarize"),
        positions="results/quality/{model}/{candidate}/positions.parquet",
        evaluation="results/quality/{model}/{candidate}/evaluation.json",
    output:
        "results/quality/{model}/{candidate}/summary.json",
    log:
        "logs/{model}/{candidate}/summarize.log",
    benchmark:
        "benchmarks/{model}/{candidate}/summarize.tsv"
    threads: 1
    resources:
        mem_mb=500,
    params:
        recipe=as_json({"seed": EXPERIMENT.config["evaluation"]["seed"], "own_texts": list(EXPERIMENT.own_texts)}),
    message:
        "Summarizing {wildcards.candidate} of {wildcards.model}"
    shell:
        "python -m yardstick.cli.summarize --recipe {params.recipe:q} --positions {input.positions}"
        " --evaluation {input.evaluation} --output {output} --log {log}"
