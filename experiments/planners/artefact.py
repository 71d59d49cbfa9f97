"""What the Sailor artefact holds, read from its folder: cases, profiles, plans.

Nothing of it is executed or copied here; its planners and simulator run in processes of their own
(:mod:`experiments.planners.their_planner`).
"""

from __future__ import annotations

import csv
import json
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from experiments.common.records import Json, read_json
from hytrain.errors import PlanError
from hytrain.tools.hybrid.pools.problem import (
    Memory,
    Plan,
    Pool,
    Problem,
    Profiles,
    Replicas,
    Stage,
    Times,
)

PLANNER = Path("sailor", "Planner")
QUOTAS = PLANNER / "sailor_planner" / "dummy_quotas_dict.json"
GIB = 2**30

MODELS = {
    "OPT-350": "training_config_opt_350.json",
    "GPT-Neo-2.7": "training_config_gpt_neo27.json",
}
"""The models that the artefact has a training configuration of."""

TRACES = {
    "homogeneous": "gpu_trace_scaled.csv",
    "heterogeneous": "gpu_trace_heterogeneous_imbalanced.csv",
    "geo": "gpu_trace_multizone.csv",
    "two types, two zones": "gpu_trace_2zones_2gpus.csv",
}
"""Its clusters by the name of the paper's section: every line of a file is one."""


@dataclass(frozen=True)
class Case:
    """A model on a cluster."""

    name: str
    model: str
    pools: Mapping[str, int]
    """``TYPE_ZONE`` -> GPUs, as the artefact writes it."""


@dataclass(frozen=True)
class Artefact:
    """A folder with a checkout of the artefact."""

    folder: Path

    def __post_init__(self) -> None:
        """Refuse a folder without it.

        Raises:
            PlanError: its simulator's profiles are not there.
        """
        wanted = self.simulations / "profiles_tmp.json"
        if not wanted.is_file():
            raise PlanError(f"{self.folder} is no checkout of the Sailor artefact: no {wanted}")

    @property
    def simulations(self) -> Path:
        return self.folder / PLANNER / "simulations"

    @property
    def commit(self) -> str | None:
        """Of the checkout; None where git does not know."""
        command = ["git", "-C", str(self.folder), "rev-parse", "HEAD"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        return found.stdout.strip() if found.returncode == 0 else None

    @cached_property
    def cluster(self) -> Json:
        """GPUs per node of every type."""
        found = read_json(self.simulations / "configs" / "basic_cluster_config.json")
        return {name: value for name, value in found.items() if isinstance(value, dict)}

    @cached_property
    def _profiles(self) -> Json:
        return read_json(self.simulations / "profiles_tmp.json")

    @cached_property
    def _memory(self) -> Json:
        return read_json(self.folder / PLANNER / "llm_info.json")

    @cached_property
    def _bandwidths(self) -> Json:
        return read_json(self.folder / "sailor" / "providers" / "multizone_bandwidths_het.json")

    def training(self, model: str) -> Json:
        return read_json(self.simulations / "configs" / MODELS[model])

    def cases(self) -> list[Case]:
        """Both models on every cluster of the traces whose GPU types have profiles of the model."""
        found: list[Case] = []
        for model in MODELS:
            for kind, name in TRACES.items():
                for pools in read_trace(self.simulations / "configs" / name):
                    found.append(Case(f"{model} {kind} {size_text(pools)}", model, pools))
        return found

    def problem(self, case: Case, memory_gib: Mapping[str, float]) -> Problem:
        """A case as hytrain's planner takes it.

        Args:
            case: of :meth:`cases`.
            memory_gib: what the artefact's simulator takes as each GPU type's memory.

        Raises:
            PlanError: a GPU type has no profile of this model.
        """
        pools = [
            Pool(
                device, zone, count, memory_gib[device] * GIB, self.cluster[device]["gpus_per_node"]
            )
            for (device, zone), count in ((key.split("_", 1), n) for key, n in case.pools.items())
        ]
        devices = sorted({pool.device for pool in pools})
        zones = sorted({pool.zone for pool in pools})
        memory = self._memory[case.model]
        layers = self.training(case.model)["num_all_layers"]
        whole = [memory["1"][str(layer)] for layer in range(layers)]
        return Problem(
            pools=tuple(pools),
            profiles=_times(self._profiles[case.model], devices, layers),
            memory={
                int(tp): Memory(
                    tuple(float(table[str(i)]["params_floats"]) for i in range(layers)),
                    tuple(float(table[str(i)]["act_mem_floats"]) for i in range(layers)),
                )
                for tp, table in memory.items()
            },
            activation_bytes=tuple(4.0 * layer["act_output_floats"] for layer in whole),
            parameter_bytes=tuple(4.0 * layer["params_floats"] for layer in whole),
            curves=_curves(self._bandwidths, devices, zones),
            batch=self.training(case.model)["global_batch_size"],
        )


def read_trace(path: Path) -> list[dict[str, int]]:
    """A cluster a line: GPUs by ``TYPE_ZONE``."""
    with path.open(newline="") as lines:
        return [
            {key: int(value) for key, value in row.items() if "_" in key}
            for row in csv.DictReader(lines)
        ]


def size_text(pools: Mapping[str, int]) -> str:
    """`32 A100-40 + 96 V100-16`; `5 x 32 A100-40` where zones are alike."""
    same = Counter((key.split("_")[0], count) for key, count in pools.items())
    parts = [
        f"{times} x {count} {device}" if times > 1 else f"{count} {device}"
        for (device, count), times in same.items()
    ]
    return " + ".join(parts)


def _times(profiles: Json, devices: Sequence[str], layers: int) -> Profiles:
    found: dict[tuple[str, int, int], Times] = {}
    for device in devices:
        if device not in profiles:
            raise PlanError(f"the artefact has no profile of {device} for this model")
        for samples, by_tp in profiles[device].items():
            for tp, table in by_tp.items():
                rows = [table[str(layer)] for layer in range(layers)]
                found[device, int(tp), int(samples)] = Times(
                    forward=tuple(row[0] for row in rows),
                    compute=tuple(row[0] + row[1] for row in rows),
                    update=tuple(row[2] for row in rows),
                )
    return found


def _curves(
    bandwidths: Json, devices: Sequence[str], zones: Sequence[str]
) -> dict[tuple[str, str, int, str, str, int], tuple[float, ...]]:
    return {
        (device, zone, int(count), other, far, int(number)): tuple(curve[0])
        for zone in zones
        for device, by_count in bandwidths[zone].items()
        if device in devices
        for count, by_zone in by_count.items()
        for far, by_device in by_zone.items()
        if far in zones
        for other, by_number in by_device.items()
        if other in devices
        for number, curve in by_number.items()
    }


# -- plans -------------------------------------------------------------------------------------


def their_plan(problem: Problem, plan: Plan) -> Json:
    """A plan of hytrain as the artefact's simulator takes it."""
    stages = [
        [
            [[[problem.pools[one.pool].device, one.tp, problem.pools[one.pool].zone]], one.tp]
            for one in stage.replicas
            for _ in range(one.count)
        ]
        for stage in plan.stages
    ]
    used: Counter[str] = Counter()
    for count, pool in zip(plan.used(len(problem.pools)), problem.pools, strict=True):
        used[pool.device] += count
    pipeline = {
        "num_stages": len(plan.stages),
        "layers_per_stage": [list(range(stage.start, stage.stop)) for stage in plan.stages],
        "tmp_per_stage": stages,
        "dp": [stage.dp for stage in plan.stages],
    }
    return {"mbs": plan.micro_batch, "pipeline_list": [pipeline], "used_gpus": dict(used)}


def our_plan(problem: Problem, plan: Json) -> Plan:
    """A plan of one of the artefact's planners, as hytrain's cost model takes it.

    Raises:
        PlanError: it has what that model does not know: pipelines with stages of their own, or
            a tensor parallel group over several nodes. Which is said.
    """
    if "pipeline_list" not in plan:
        return _grid_plan(problem, plan)
    if len(plan["pipeline_list"]) > 1:
        raise PlanError(f"{len(plan['pipeline_list'])} pipelines, each with stages of its own")
    pipeline = plan["pipeline_list"][0]
    stages: list[Stage] = []
    for layers, replicas in zip(
        pipeline["layers_per_stage"], pipeline["tmp_per_stage"], strict=True
    ):
        members: list[Replicas] = []
        for machines, tp in replicas:
            if len(machines) > 1:
                raise PlanError("a tensor parallel group over several nodes")
            pool = _pool(problem, machines[0][0], machines[0][2])
            if members and (members[-1].pool, members[-1].tp) == (pool, tp):
                members[-1] = Replicas(pool, tp, members[-1].count + 1)
            else:
                members.append(Replicas(pool, tp, 1))
        stages.append(Stage(layers[0], layers[-1] + 1, tuple(members)))
    return Plan(tuple(stages), plan["mbs"])


def _grid_plan(problem: Problem, plan: Json) -> Plan:
    """Varuna and Galvatron give only degrees; the simulator cuts the layers evenly."""
    layers, count = problem.num_layers, plan["P"]
    each, more = divmod(layers, count)
    # The first cuts move by one for every layer that is left over, as the simulator's do.
    cuts = [each * i + min(i, more) for i in range(count + 1)]
    pool = _pool(problem, plan["gpu_type"], plan["zone"])
    replicas = (Replicas(pool, plan["T"], plan["D"]),)
    stages = [Stage(a, b, replicas) for a, b in pairwise(cuts)]
    return Plan(tuple(stages), plan["mbs"])


def _pool(problem: Problem, device: str, zone: str) -> int:
    for index, pool in enumerate(problem.pools):
        if (pool.device, pool.zone) == (device, zone):
            return index
    raise PlanError(f"there is no pool of {device} in {zone}")


def write_request(path: Path, request: Json) -> None:
    path.write_text(json.dumps(request))
