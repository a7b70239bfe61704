# How fast packed weights are multiplied and decoded here: results/engine/<model>/speed.md.


rule bench_products:
    input:
        code=code("yardstick.cli.bench_products"),
        model="data/models/{model}/manifest.json",
        checkpoint=timed_checkpoint,
    output:
        "results/engine/{model}/products.json",
    log:
        "logs/{model}/bench_products.log",
    benchmark:
        "benchmarks/{model}/bench_products.tsv"
    threads: workflow.cores
    resources:
        gpu=1,
        mem_mb=4000,
    params:
        recipe=lambda w: as_json(
            {"model": w.model, "candidate": ENGINE["candidate"]} | {key: ENGINE[key] for key in ("rows", "dtypes")}
        ),
    message:
        "Timing the paths of the engine at the shapes of {wildcards.model}"
    shell:
        "python -m yardstick.cli.bench_products --recipe {params.recipe:q} --model {input.model}"
        " --checkpoint {input.checkpoint} --output {output} --log {log}"


rule bench_decode:
    input:
        code=code("yardstick.cli.bench_decode"),
        model="data/models/{model}/manifest.json",
        checkpoint=timed_checkpoint,
        chunks="data/quality/{model}/chunks.npz",
    output:
        "results/engine/{model}/decode-{weights}-{dtype}.json",
    log:
        "logs/{model}/bench_decode-{weights}-{dtype}.log",
    benchmark:
        "benchmarks/{model}/bench_decode-{weights}-{dtype}.tsv"
    wildcard_constraints:
        weights="packed|dense",
        dtype=closed_list(ENGINE["dtypes"]),
    threads: workflow.cores
    resources:
        gpu=1,
        mem_mb=4000,
    params:
        recipe=lambda w: as_json(
            {"mode": w.weights, "dtype": w.dtype} | {key: ENGINE[key] for key in ("prompt", "steps", "draft")}
        ),
    message:
        "Timing how {wildcards.model} is decoded, weights {wildcards.weights}, {wildcards.dtype}"
    shell:
        "python -m yardstick.cli.bench_decode --recipe {params.recipe:q} --model {input.model}"
        " --checkpoint {input.checkpoint} --chunks {input.chunks} --output {output} --log {log}"


rule tabulate_speed:
    input:
        code=code("yardstick.cli.tabulate_speed"),
        products="results/engine/{model}/products.json",
        decode=timed_decoding,
    output:
        json="results/engine/{model}/speed.json",
        plot=report("results/engine/{model}/roofline.png", caption="../report/speed.rst", category="Engine"),
        table=report("results/engine/{model}/speed.md", caption="../report/speed.rst", category="Engine"),
    log:
        "logs/{model}/tabulate_speed.log",
    benchmark:
        "benchmarks/{model}/tabulate_speed.tsv"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        recipe=as_json({}),
    message:
        "Writing {output.table}"
    shell:
        "python -m yardstick.cli.tabulate_speed --recipe {params.recipe:q} --products {input.products}"
        " --decode {input.decode} --json {output.json} --plot {output.plot} --output {output.table} --log {log}"
