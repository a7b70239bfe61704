# What candidates, the original and servers answer to arithmetic in words.


wildcard_constraints:
    answering=closed_list(ANSWERING_NAMES),
    server=closed_list(EXPERIMENT.servers),


rule build_problems:
    input:
        code=code("yardstick.cli.build_problems"),
        file=problem_file,
    output:
        "data/gsm8k/problems.json",
    log:
        "logs/gsm8k/build_problems.log",
    benchmark:
        "benchmarks/gsm8k/build_problems.tsv"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        recipe=as_json({key: TASK.get(key) for key in ("problems", "examples")}),
        stamps=lambda w: stamps(problem_file(w)),
    message:
        "Collecting the problems"
    shell:
        "python -m yardstick.cli.build_problems --recipe {params.recipe:q} --output {output} --log {log}"


rule answer_problems:
    input:
        code=answering_code,
        model="data/models/{model}/manifest.json",
        checkpoint=checkpoint,
        content=checkpoint_content,
        problems="data/gsm8k/problems.json",
    output:
        generations="results/gsm8k/{model}/{candidate}/generations.parquet",
        record="results/gsm8k/{model}/{candidate}/generation.json",
    log:
        "logs/{model}/{candidate}/answer_problems.log",
    benchmark:
        "benchmarks/{model}/{candidate}/answer_problems.tsv"
    wildcard_constraints:
        candidate=closed_list(ANSWERING_NAMES - set(EXPERIMENT.servers)),
    priority: 1  # a fetched candidate is there only while it is needed
    threads: workflow.cores
    resources:
        gpu=1,
        mem_mb=4000,
    params:
        recipe=lambda w: as_json(answering_params(w)),
        checkpoint=lambda w: " ".join(f"--checkpoint {path}" for path in checkpoint(w)),
    message:
        "{wildcards.candidate} of {wildcards.model} answers"
    shell:
        "python -m yardstick.cli.answer_problems --recipe {params.recipe:q} --name {wildcards.candidate}"
        " --model {input.model} {params.checkpoint} --problems {input.problems}"
        " --kept results/gsm8k/{wildcards.model}/{wildcards.candidate}/kept.jsonl"
        " --generations {output.generations} --output {output.record} --log {log}"


rule ask_server:
    input:
        code=code("yardstick.cli.ask_server"),
        problems="data/gsm8k/problems.json",
    output:
        generations="results/gsm8k/{model}/{server}/generations.parquet",
        record="results/gsm8k/{model}/{server}/generation.json",
    log:
        "logs/{model}/{server}/ask_server.log",
    benchmark:
        "benchmarks/{model}/{server}/ask_server.tsv"
    threads: 1
    resources:
        mem_mb=1000,
    params:
        recipe=lambda w: as_json({"model": w.model, "answer": EXPERIMENT.answering_recipe(w.server)}),
        connection=lambda w: as_json(EXPERIMENT.connection(w.server)),
    message:
        "Asking {wildcards.server} for {wildcards.model}"
    shell:
        "python -m yardstick.cli.ask_server --recipe {params.recipe:q} --connection {params.connection:q}"
        " --name {wildcards.server} --problems {input.problems}"
        " --kept results/gsm8k/{wildcards.model}/{wildcards.server}/kept.jsonl"
        " --generations {output.generations} --output {output.record} --log {log}"


rule score_answers:
    input:
        code=code("yardstick.cli.score_answers"),
        problems="data/gsm8k/problems.json",
        generations="results/gsm8k/{model}/{answering}/generations.parquet",
        record="results/gsm8k/{model}/{answering}/generation.json",
        reference=original_answers,
    output:
        answers="results/gsm8k/{model}/{answering}/answers.parquet",
        summary="results/gsm8k/{model}/{answering}/summary.json",
    log:
        "logs/{model}/{answering}/score_answers.log",
    benchmark:
        "benchmarks/{model}/{answering}/score_answers.tsv"
    threads: 1
    resources:
        mem_mb=500,
    params:
        recipe=as_json(
            {
                "answer": TASK.get("answer"),
                "margin": TASK.get("margin"),
                "seed": EXPERIMENT.config["evaluation"]["seed"],
            }
        ),
        reference=lambda w: " ".join(f"--reference {path}" for path in original_answers(w)),
    message:
        "Scoring {wildcards.answering} of {wildcards.model}"
    shell:
        "python -m yardstick.cli.score_answers --recipe {params.recipe:q} --problems {input.problems}"
        " --generations {input.generations} --record {input.record} {params.reference}"
        " --answers {output.answers} --output {output.summary} --log {log}"


rule tabulate_answers:
    input:
        code=code("yardstick.cli.tabulate_answers"),
        summaries=[f"results/gsm8k/{m}/{name}/summary.json" for m, names in ANSWERING.items() for name in names],
    output:
        report("results/gsm8k/table.md", caption="../report/gsm8k.rst", category="Tasks"),
    log:
        "logs/gsm8k/tabulate_answers.log",
    benchmark:
        "benchmarks/gsm8k/tabulate_answers.tsv"
    threads: 1
    resources:
        mem_mb=500,
    params:
        recipe=as_json(ANSWERING),
    message:
        "Writing {output}"
    shell:
        "python -m yardstick.cli.tabulate_answers --recipe {params.recipe:q} --results results/gsm8k"
        " --output {output} --log {log}"
