"""One search by a planner of the Sailor artefact, or its simulator on given plans, in a process.

    python their_planner.py REQUEST ANSWER

REQUEST and ANSWER are JSON files. This file imports nothing of hytrain or of the experiments, so
that it runs in whatever environment the artefact's planners need; the artefact's `sailor` package
is found in the folder that the request names. What their code prints is thrown away.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

Json = dict[str, Any]

BASELINES = "sailor.Planner.baselines"


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _paths(request: Json) -> tuple[Path, Path]:
    root = Path(request["root"])
    return root, root / "sailor" / "sailor" / "Planner"


def _nodes(request: Json, gpu_type: str, count: int) -> Json:
    cluster = request["cluster"][gpu_type]
    each = cluster["gpus_per_node"]
    return {
        "num_nodes": count // each,
        "gpus_per_node": each,
        "mem_per_gpu": cluster["mem_per_gpu"],
    }


def _pools(request: Json) -> list[tuple[str, str, int]]:
    """(GPU type, zone, GPUs) of every pool, in the artefact's order."""
    named = ([*key.split("_", 1), count] for key, count in request["pools"].items())
    return [(gpu_type, zone, count) for gpu_type, zone, count in named]


# The inputs that the artefact's simulations/simulator.py gives each family of planners.


def _all_pools(request: Json) -> Json:
    """Sailor: every pool, and no limit on money."""
    return {**request["pools"], "max_cost": 0.0, "min_throughput": 0.0}


def _device_pools(request: Json) -> Json:
    """DTFM: every pool, with the GPUs per node of every type."""
    types = sorted({gpu_type for gpu_type, _, _ in _pools(request)})
    each = {one: request["cluster"][one]["gpus_per_node"] for one in types}
    return {**request["pools"], "gpu_types": types, "gpus_per_node": each}


def _types(request: Json) -> Json:
    """Metis, AMP, FlashFlex: GPU types of one zone, the last pool's zone for all."""
    pools = _pools(request)
    cluster = {gpu_type: _nodes(request, gpu_type, count) for gpu_type, _, count in pools}
    return {**cluster, "zone": pools[-1][1]}


def _zones(request: Json) -> Json:
    """Atlas: the first GPU type, in all its zones."""
    pools = _pools(request)
    gpu_type = pools[0][0]
    found = {key: n for key, n in request["pools"].items() if key.split("_")[0] == gpu_type}
    each = request["cluster"][gpu_type]["gpus_per_node"]
    return {**found, "gpus_per_node": each, "gpu_type": gpu_type}


def _first_pool(request: Json) -> Json:
    """Varuna, Piper, Galvatron, Aceso: the first pool only."""
    gpu_type, zone, count = _pools(request)[0]
    return {"gpu_type": gpu_type, **_nodes(request, gpu_type, count), "zone": zone}


def _built(request: Json) -> tuple[Any, Json]:
    """The planner and its cluster.

    Raises:
        FileNotFoundError: the artefact has no profile of that planner for this model and GPU type.
    """
    name, model = request["planner"], request["model"]
    _, planner_folder = _paths(request)
    baselines = planner_folder / "baselines"
    training = str(planner_folder / "simulations" / "configs" / request["training_config"])
    first_type = _pools(request)[0][0]
    each = request["cluster"][first_type]["gpus_per_node"]
    layer_profiles = str(planner_folder / "simulations" / "profiles_tmp.json")
    goal = "throughput"

    def profile(*parts: str) -> str:
        found = baselines.joinpath(*parts)
        if not found.exists():
            raise FileNotFoundError(f"no profile {found.relative_to(planner_folder)}")
        return str(found)

    def planner(folder: str, module: str, cls: str) -> Any:
        return getattr(_module(f"{BASELINES}.{folder}.{module}"), cls)

    if name == "Varuna":
        cls = planner("Varuna", "varuna_planner", "VarunaPlanner")
        path = profile("Varuna", "profiles", model, first_type, f"profile_{each}.json")
        return cls(path, goal), _first_pool(request)
    if name == "Piper":
        cls = planner("Piper", "piper_planner", "PiperPlanner")
        path = profile("Piper", "profiles", model, first_type, "profile.json")
        return cls(path), _first_pool(request)
    if name == "AMP":
        for gpu_type, _, _ in _pools(request):
            profile("AMP", "profiles", model, gpu_type)
        cls = planner("AMP", "amp_planner", "AMPPlanner")
        return cls(profile("AMP", "profiles", model), goal), _types(request)
    if name == "Metis":
        for gpu_type, _, _ in _pools(request):
            profile("Metis", "profiles", model, gpu_type)
        module = _module(f"{BASELINES}.Metis.metis_planner")
        module.TIME_BUDGET_SEC = request["budget_seconds"]
        return module.MetisPlanner(profile("Metis", "profiles", model), training), _types(request)
    if name == "Galvatron":
        cls = planner("Galvatron", "galvatron_planner", "GalvatronPlanner")
        path = profile("Galvatron", "profiles", model, first_type)
        return cls(training, path, goal), _first_pool(request)
    if name == "Aceso":
        cls = planner("Aceso", "aceso_planner", "AcesoPlanner")
        path = profile("Aceso", "profiler", first_type)
        return cls(path, fp16=False), _first_pool(request)
    memory = json.loads((planner_folder / "llm_info.json").read_text())
    if name == "Atlas":
        cls = planner("Atlas", "atlas_planner", "AtlasPlanner")
        return cls(layer_profiles, training, memory, False, goal), _zones(request)
    if name == "DTFM":
        cls = planner("DTFM", "dtfm_planner", "DTFMPlanner")
        return cls(layer_profiles, training, memory, False), _device_pools(request)
    if name == "FlashFlex":
        cls = planner("FlashFlex", "flashflex_planner", "FlashFlexPlanner")
        return cls(profile("FlashFlex", "src", "machine_amounts.json")), _types(request)
    if name == "Sailor":
        folder = planner_folder / "sailor_planner" / "profiles" / model
        quotas = json.loads(Path(request["quotas"]).read_text())
        for gpu_type in quotas:
            if not (folder / gpu_type).exists():
                raise FileNotFoundError(f"no profile {folder.name}/{gpu_type} of Sailor")
        module = _module("sailor.Planner.sailor_planner.cpp_src.planner")
        # Its constructor builds the library with make on every call, for another Python; ours is
        # built beforehand (README.md) and found on the path.
        module.os.system = _nothing
        return module.SailorPlanner(
            f"{folder}/", training, request["quotas"], goal, False
        ), _all_pools(request)
    raise ValueError(f"no planner {name!r}")


def _nothing(command: str) -> int:
    """In place of os.system."""
    return 0


def _plain(data: Any) -> Any:
    """Their plan as JSON: their own vectors and tuples become lists, tensors are left out."""
    if isinstance(data, dict):
        return {str(key): _plain(value) for key, value in data.items() if key != "original"}
    if isinstance(data, str | bool | int | float) or data is None:
        return data
    if hasattr(data, "item"):
        return data.item()
    return [_plain(one) for one in data]


def _simulator(request: Json) -> Any:
    root, planner_folder = _paths(request)
    module = _module("sailor.Planner.simulations.runtime_simulator")
    return module.Simulator(
        str(root),
        _training(request),
        json.loads((planner_folder / "llm_info.json").read_text()),
        False,
        json.loads((planner_folder / "simulations" / "profiles_tmp.json").read_text()),
        zone=_pools(request)[0][1],
    )


def _training(request: Json) -> Json:
    _, planner_folder = _paths(request)
    configs = planner_folder / "simulations" / "configs"
    return json.loads((configs / request["training_config"]).read_text())


def plan(request: Json) -> Json:
    """The planner's own choice: its best plan that fits into memory by the simulator's check.

    Returns:
        ``seconds`` of the search alone, ``plans`` that it ranked, ``oom`` of them passed over,
        ``plan`` (None where none fits) and ``iteration_seconds`` of it under the simulator.
    """
    planner, cluster = _built(request)
    start, cpu = time.perf_counter(), _cpu_seconds()
    ranked = planner.get_sorted_plans(cluster_config=cluster, training_config=_training(request))
    seconds, cpu = time.perf_counter() - start, _cpu_seconds() - cpu
    answer: Json = {"seconds": seconds, "cpu_seconds": cpu, "plans": len(ranked), "oom": 0}
    answer["plan"] = None
    if request["planner"] == "Aceso":
        return {**answer, "plan": _plain(ranked[0]) if ranked else None}
    simulator = _simulator(request)
    for one in ranked:
        if simulator.check_config_fits(one):
            found, _, _ = simulator.simulate_iteration_time(one)
            return {**answer, "plan": _plain(one), "iteration_seconds": float(found)}
        answer["oom"] += 1
    return answer


def simulate(request: Json) -> Json:
    """The simulator's verdict on the request's ``plans``: seconds, and whether each fits."""
    simulator = _simulator(request)
    verdicts: list[Json] = []
    for one in request["plans"]:
        found, _, _ = simulator.simulate_iteration_time(one)
        verdicts.append({"seconds": float(found), "fits": bool(simulator.check_config_fits(one))})
    return {"verdicts": verdicts}


def memory(request: Json) -> Json:
    """What the simulator takes as the memory of each GPU type, GiB."""
    return {"memory_gib": _module("sailor.Planner.simulations.constants").GPU_MEMORY_GB}


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main(request_file: str, answer_file: str) -> None:
    """Read the request, work, write the answer; an error is an answer too."""
    request = json.loads(Path(request_file).read_text())
    os.environ["SAILOR_PATH"] = request["root"]
    # Aceso's operator-level simulator looks below the home folder.
    os.environ["HOME"] = request["root"]
    sys.path[:0] = [str(Path(request["root"]) / "sailor"), *request.get("library_folders", [])]
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    try:
        answer = {"plan": plan, "simulate": simulate, "memory": memory}[request["task"]](request)
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    Path(answer_file).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
