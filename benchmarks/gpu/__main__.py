"""Is inloop right on this machine's GPU, and what does it cost there?

    python -m benchmarks.gpu [--only SECTION] [--quick] [--out gpu-report.json]          (make test-gpu)

Takes some minutes, prints one table and writes a report with versions, the GPUs' names and the results, and nothing else. Exit code: 0 if all is well,
1 if something is wrong, 2 if torch sees no GPU.
"""

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from benchmarks.gpu import cost, exactness, processes, streams
from benchmarks.gpu.findings import Finding
from benchmarks.gpu.report import is_well, print_table, write_report

SECTIONS: dict[str, Callable[[str, bool], Iterator[Finding]]] = {
    section.SECTION: section.check for section in (exactness, streams, processes, cost)
}
NO_GPU = (
    f"torch {torch.__version__} sees no GPU, so there is nothing to test. Fix: see with nvidia-smi whether the driver sees it, and install a build of "
    "torch for it into .venv (https://pytorch.org/get-started/locally)."
)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=SECTIONS, action="append", help="one section; can be given again")
    parser.add_argument("--quick", action="store_true", help="the cost of small models only, measured less often")
    parser.add_argument("--out", type=Path, default=Path("gpu-report.json"), metavar="FILE.json")
    return parser.parse_args(arguments)


def run(sections: Sequence[str], quick: bool, out: Path) -> list[Finding]:
    """All findings; after each section they are written, since the next one may take its time."""
    findings: list[Finding] = []
    for section in sections:
        for finding in SECTIONS[section]("cuda", quick):
            print(f"{section}: {finding.case}: {finding.verdict}", file=sys.stderr, flush=True)
            findings.append(finding)
        write_report(findings, out)
    return findings


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings and remarks inside the block: what they are about is meant here."""
    log = logging.getLogger("inloop")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    with quiet():
        findings = run(options.only or list(SECTIONS), options.quick, options.out)
    print_table(findings)
    wrong = sum(finding.verdict == "WRONG" for finding in findings)
    skipped = sum(finding.verdict == "skipped" for finding in findings)
    print(
        (f"{wrong} of {len(findings)} WRONG." if wrong else "Nothing is wrong.")
        + (f" {skipped} skipped." if skipped else "")
    )
    print(f"Please send us {options.out}: it has versions, the names of GPUs, these results, and nothing else.")
    return 0 if is_well(findings) else 1


if __name__ == "__main__":
    sys.exit(main())
