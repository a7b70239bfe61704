# What people read: the table, the plots and the whole record.


rule tabulate:
    input:
        code=code("yardstick.cli.tabulate"),
        summaries=of_all("summary.json"),
        positions=of_all("positions.parquet"),
        recorded=recorded_figures,
    output:
        report("results/quality/table.md", caption="../report/table.rst", category="Fidelity"),
    log:
        "logs/tabulate.log",
    benchmark:
        "benchmarks/tabulate.tsv"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        recipe=TABLE_RECIPE,
    message:
        "Writing {output}"
    shell:
        "python -m yardstick.cli.tabulate --recipe {params.recipe:q} --results results/quality --output {output}"
        " --log {log}"


rule plot:
    input:
        code=code("yardstick.cli.plot"),
        summaries=of_all("summary.json"),
        positions=of_all("positions.parquet"),
    output:
        bits=report("results/quality/plots/{model}/kl-bits.png", caption="../report/kl_bits.rst", category="Fidelity"),
        tail=report("results/quality/plots/{model}/kl-tail.png", caption="../report/kl_tail.rst", category="Fidelity"),
    log:
        "logs/{model}/plot.log",
    benchmark:
        "benchmarks/{model}/plot.tsv"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        recipe=TABLE_RECIPE,
    message:
        "Plotting {wildcards.model}"
    shell:
        "python -m yardstick.cli.plot --recipe {params.recipe:q} --results results/quality"
        " --model {wildcards.model} --bits {output.bits} --tail {output.tail} --log {log}"


rule write_record:
    input:
        code=code("yardstick.cli.document"),
        summaries=of_all("summary.json"),
        positions=of_all("positions.parquet"),
        quantized=of_all("quantize.json", EXPERIMENT.variants, EXPERIMENT.rivals),
        probes=[f"results/quality/{m}/{name}/probe.json" for m, names in PROBED.items() for name in names],
        answers=[f"results/gsm8k/{m}/{name}/summary.json" for m, names in ANSWERING.items() for name in names],
        recorded=recorded_figures,
        corpora=expand("data/quality/{model}/manifest.json", model=EXPERIMENT.models),
        plots=expand("results/quality/plots/{model}/{plot}.png", model=EXPERIMENT.models, plot=["kl-bits", "kl-tail"]),
        parts=[path for file in ("summary.json", "positions.parquet") for path in of_parts(file)],
        attributions=of_attributed("results/quality/{model}/{name}/attribution.json"),
        attribution_plots=of_attributed("results/quality/plots/{model}/attribution-{name}.png"),
    output:
        report("results/quality/quantization.md", caption="../report/quantization.rst", category="Fidelity"),
    log:
        "logs/write_record.log",
    benchmark:
        "benchmarks/write_record.tsv"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        recipe=RECORD_RECIPE,
    message:
        "Writing {output}"
    shell:
        "python -m yardstick.cli.document --recipe {params.recipe:q} --results results/quality"
        " --answers results/gsm8k --corpora data/quality --benchmarks benchmarks --output {output} --log {log}"
