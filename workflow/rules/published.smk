# Rivals that others made: fetched as published, or found on this machine; read as they are, or spelled out first.


rule retrieve_rival:
    input:
        code=rival_code,
        model="data/models/{model}/manifest.json",
        ready=ready_to_measure,
    output:
        # measured, then deleted; what is left is the manifest with its digests
        files=temp(directory("results/quality/{model}/{rival}/checkpoint/files")),
        manifest="results/quality/{model}/{rival}/checkpoint/manifest.json",
        record="results/quality/{model}/{rival}/quantize.json",
    log:
        "logs/{model}/{rival}/retrieve_rival.log",
    benchmark:
        "benchmarks/{model}/{rival}/retrieve_rival.tsv"
    wildcard_constraints:
        rival=closed_list(EXPERIMENT.rivals_of("hub")),
    # one at a time on the disk: nothing else runs beside it, and what can be measured is measured before the next
    threads: workflow.cores
    resources:
        mem_mb=1000,
    params:
        recipe=lambda w: as_json(EXPERIMENT.recipe(w.rival)),
    message:
        "Fetching the rival {wildcards.rival} of {wildcards.model}"
    shell:
        "python -m yardstick.cli.retrieve_rival --recipe {params.recipe:q} --name {wildcards.rival} --model {input.model}"
        " --downloads data/downloads --output {output.manifest} --record {output.record} --log {log}"


rule find_rival:
    input:
        code=rival_code,
        model="data/models/{model}/manifest.json",
        local=local_rival,
    output:
        manifest="results/quality/{model}/{rival}/checkpoint/manifest.json",
        record="results/quality/{model}/{rival}/quantize.json",
    log:
        "logs/{model}/{rival}/find_rival.log",
    benchmark:
        "benchmarks/{model}/{rival}/find_rival.tsv"
    wildcard_constraints:
        rival=closed_list(EXPERIMENT.rivals_of("local")),
    threads: 1
    resources:
        mem_mb=1000,
    params:
        recipe=lambda w: as_json(EXPERIMENT.recipe(w.rival)),
        files=lambda w: stamps(local_rival(w)),
    message:
        "Looking at the rival {wildcards.rival} of {wildcards.model}"
    shell:
        "python -m yardstick.cli.retrieve_rival --recipe {params.recipe:q} --name {wildcards.rival} --model {input.model}"
        " --downloads data/downloads --output {output.manifest} --record {output.record} --log {log}"


rule decode_rival:
    input:
        code=code("yardstick.cli.decode_rival"),
        script=tool_script,
        packages=tool_packages,
        model="data/models/{model}/manifest.json",
        checkpoint="results/quality/{model}/{rival}/checkpoint/manifest.json",
        files=fetched_files,
    output:
        files=temp(directory("results/quality/{model}/{rival}/decoded/files")),
        manifest="results/quality/{model}/{rival}/decoded/manifest.json",
    log:
        "logs/{model}/{rival}/decode_rival.log",
    benchmark:
        "benchmarks/{model}/{rival}/decode_rival.tsv"
    wildcard_constraints:
        rival=closed_list(name for name in EXPERIMENT.rivals if EXPERIMENT.decoder(name)),
    priority: 1
    threads: workflow.cores
    resources:
        gpu=1,
        mem_mb=4000,
    params:
        recipe=as_json({}),
    message:
        "Spelling out the weights of {wildcards.rival} of {wildcards.model}"
    shell:
        "python -m yardstick.cli.decode_rival --recipe {params.recipe:q} --name {wildcards.rival} --model {input.model}"
        " --checkpoint {input.checkpoint} --packages {input.packages} --script {input.script}"
        " --output {output.manifest} --log {log}"
