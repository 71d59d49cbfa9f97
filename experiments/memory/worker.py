"""One size and stage: memory said and measured, saves beside training, rates, states that leave.

    python -m experiments.memory.worker JOB.json RESULT.json

Progress goes to the standard output, everything else to the standard error. RESULT.json is
rewritten with every figure. At the deadline the process ends itself, with its stacks in the log.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.common.processes import end
from experiments.common.records import read_json

if TYPE_CHECKING:
    from experiments.memory.case import Case

_PROBE_BYTES = 64 << 20


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    progress = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print belongs to the log
    job, path = read_json(Path(arguments[0])), Path(arguments[1])
    # Python's lock is not needed for it: a registration of memory or a write may hold that.
    faulthandler.dump_traceback_later(max(1.0, job["deadline"] - time.time()), exit=True)

    # Importing takes seconds, which count.
    from experiments.memory.case import Case

    case = Case(job, path, progress)
    case.say("imported")
    try:
        _run(case)
        case.result["status"] = "ok"
    except Exception as error:
        # The process boundary: the table says what went wrong, beside what was measured before.
        traceback.print_exc()
        case.result["status"] = f"{type(error).__name__}: {error}"[:500]
        case.say(case.result["status"])
    case.keep()
    return int(case.result["status"] != "ok")


def _run(case: Case) -> None:
    from experiments.common.hardware import describe
    from experiments.memory import contract, stall, states
    from experiments.memory.meters import PinnedBytes, disk_rates

    parts = case.job["parts"]
    case.result["hardware"] = describe(case.job["device"])
    pinned = PinnedBytes()
    probe = disk_rates(case.folder.with_name("probe"), [_PROBE_BYTES // 8] * 8, _PROBE_BYTES)
    case.result["probe"] = probe
    rate = probe["write_8"]
    case.say(f"the disk writes {rate / 1e9:.2f} GB/s, and reads {probe['read_8'] / 1e9:.2f}")
    case.part("warm-up", lambda: _warm_up(case))
    engine, meter = contract.build_and_step(case, pinned)
    saving = 2.0 + case.job["checkpoint_bytes"] / rate
    if "stall" in parts:
        # As far as there is time: steps beside the copying are what matters most.
        case.part("stall", lambda: stall.measure(case, engine), 10.0)
    if "rates" in parts:
        case.result["rates"] = {}
        case.part("rates", lambda: contract.save_and_load(case, engine, meter), saving)
    if "states" in parts:
        # Last: the pinned memory that it keeps would count as a save's.
        case.part("states", lambda: states.rates(case, engine))
    engine.destroy()
    if "cycles" in parts:
        case.part("cycles", lambda: states.growth(case))


def _warm_up(case: Case) -> None:
    """Libraries, allocators and threads get what they take once from a small engine."""
    engine = case.build(case.model(case.job["small"]))
    for _ in range(3):
        case.step(engine)
    case.save_now(engine)
    engine.load_checkpoint(str(case.folder), tag="now")
    engine.destroy()


if __name__ == "__main__":
    end(main(sys.argv[1:]))
