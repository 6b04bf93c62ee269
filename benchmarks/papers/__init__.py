"""The tables of five papers, run again in small, each with the paper's figure beside it.

    python -m benchmarks.papers list
    python -m benchmarks.papers bf16.memory cpd.examples
    python -m benchmarks.papers all --seeds 3
    python -m benchmarks.papers page             # docs/papers.md from what was kept; settles a merge of it, too

**To add a table**, add a file ``tables/PAPER_NAME.py`` (for the name ``PAPER.NAME``, which `catalog.PAPERS` lists)::

    TITLE = "what the table shows"
    SOURCE = "Table 4"                         # where in the paper
    PUBLISHED = {"fp32": {"accuracy": 95.45}}  # row -> column -> the paper's figure
    SMALLER = "Sentences: what is smaller here."  # "" where nothing is
    DEVIATES = "Sentences: what differs, and why."
    SEEDS = 3                                  # of a default run; 1 where nothing is random

    def run(seed: int, full: bool) -> Iterator[Row]:
        for name in sides:
            yield name, {"accuracy": ..., "loss": ..., "curve": [...]}

    CLAIMS = [Claim("one sentence (paper: its figure)", higher("ours", "theirs", "accuracy"))]

    def draw(found: Found) -> str:             # where the paper has a figure; may be left out
        return svg.curves({name: found.curve(name, "curve") for name in found.rows}, "steps", "loss")

    def parts(full: bool) -> Sequence[str]:    # where a seed takes minutes; may be left out
        return networks                        # then `run` takes one more, and its rows are "part" or begin with "part,"

    def unable() -> str:                       # why it cannot run on this machine, "" where it can; may be left out

A row yields as soon as it is measured, so that the bar moves. Numbers and texts are shown; lists are only for `draw`.
Rows have the same names for every seed, and a seed decides everything random: two sides of one seed are compared with
each other. ``full`` (``--full``) is for the longer sweep. A default seed should take half a minute of one core or less.
The first claim is the one the overview shows. A claim that does not hold says why in `Claim.why`. Nothing is tuned
until a claim appears. Then ``python -m benchmarks.papers PAPER.NAME`` writes ``results/papers/`` and docs/papers.md.
"""
