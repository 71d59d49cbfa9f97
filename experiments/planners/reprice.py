"""Price the plans of results anew under hytrain's models.

    python experiments/planners/reprice.py --sailor DIR OUT/result.json [...]

For plans that were made before a model was there, or has changed: what the artefact's planners and
its simulator said stays as it is. The files are rewritten.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import records
from experiments.planners.artefact import Artefact
from experiments.planners.run import our_verdict


def main(arguments: Sequence[str]) -> None:
    """Price all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", nargs="+", type=Path)
    parser.add_argument("--sailor", required=True, type=Path, metavar="DIR")
    options = parser.parse_args(arguments)
    artefact = Artefact(options.sailor)
    cases = {case.name: case for case in artefact.cases()}
    for path in options.result:
        result = records.read_json(path)
        for name, of_case in result["cases"].items():
            problem = artefact.problem(cases[name], result["memory_gib"])
            for planner, run in of_case["runs"].items():
                if run.get("plan") is not None and planner != "Aceso":
                    run.update(our_verdict(problem, run["plan"]))
        records.write_json(path, result)


if __name__ == "__main__":
    main(sys.argv[1:])
