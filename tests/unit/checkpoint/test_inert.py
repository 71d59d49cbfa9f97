"""Nothing of a stranger's pickle is imported or called, and it takes memory as its size is."""

from __future__ import annotations

import argparse
import collections
import contextlib
import enum
import io
import os
import pickle
import random
import struct
import tracemalloc
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum
from torch import nn

from hytrain.checkpoint import inert, torch_files
from hytrain.errors import CheckpointError


def _by_torch(path: Path) -> Any:
    return torch_files.load(path, mmap=False)


def _by_torch_mapped(path: Path) -> Any:
    return torch_files.load(path)


def _trusting(path: Path) -> Any:
    return torch_files.load(path, trusted=True)


READERS = (_by_torch, _by_torch_mapped)


class Call:
    """Pickled as a call."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.made = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.made


class Colour(enum.Enum):
    RED = 1


class Mine:
    def __init__(self) -> None:
        self.rate = 0.5


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return type(one) is type(other) and torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, np.ndarray):
        # Of numbers in the other byte order numpy itself makes others.
        return one.dtype.newbyteorder("=") == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and one == other


def _plain() -> dict[str, Any]:
    """All kinds of values that checkpoints have."""
    shared = torch.arange(12.0).reshape(3, 4)
    parameter = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    parameter.allreduce = True
    state = nn.Linear(2, 3).state_dict()
    return {
        **{"module": state, "t": shared.t(), "part": shared[1:], "p": parameter, "whole": shared},
        **{"empty": torch.empty(0, 3), "scalar": torch.tensor(2), "bool": torch.tensor([True])},
        **{"complex": 1 + 2j, "bytes": b"\x00\xff", "none": b"", "array": bytearray(b"ab"), "": ""},
        **{"set": {1, "a"}, "frozen": frozenset((1, (2, 3))), "size": torch.Size((2, 3))},
        **{"dtype": torch.float16, "device": torch.device("cuda", 1), "big": 10**300, "no": None},
        **{"random": random.getstate(), "numpy": np.random.get_state(legacy=True)},
        **{"rng": torch.get_rng_state(), "np": np.float64(0.5), "np32": np.float32(0.25)},
        **{"npb": np.bool_(True), "npi": np.int64(-3), "matrix": np.arange(6, dtype=">i4")},
        "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "counts": collections.Counter({3: 2}),
        "default": collections.defaultdict(list, {"a": [1]}),
        "ordered": OrderedDict(((1, 2), (0, [{}]))),
        "storage": torch.arange(3.0).untyped_storage(),
        "typed": torch.arange(3.0).storage(),
    }


def test_what_checkpoints_hold_is_read(tmp_path: Path) -> None:
    path, plain = tmp_path / "plain.pt", _plain()
    torch.save(plain, path)
    for read in (*READERS, _trusting):
        found = read(path)
        for key in ("storage", "typed"):
            assert found.pop(key).tolist() == plain[key].tolist()
        module = found["module"]
        found["module"] = OrderedDict((name, tensor + 0) for name, tensor in module.items())
        for key in found:
            assert _same(plain[key], found[key]), (read, key, found[key])
        assert set(module._metadata) == set(plain["module"]._metadata)
        assert found["p"].allreduce is True
        assert found["p"].requires_grad
        assert found["part"].data_ptr() == found["whole"].data_ptr() + 16


def test_other_protocols_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.pt"
    torch.save({"a": 1}, path, pickle_protocol=4)
    for read in READERS:
        with pytest.raises(CheckpointError, match=r"operation that torch\.save does not use"):
            read(path)
    assert _trusting(path) == {"a": 1}


def test_a_stage_that_is_pickled_by_its_name(tmp_path: Path) -> None:
    """As Python 3.11.0 to 3.11.3 does; others pickle its number."""
    path = tmp_path / "stage.pt"
    named = {"named": Call(getattr, ZeroStageEnum, "gradients"), "given": ZeroStageEnum.weights}
    torch.save(named | {"none": Call(getattr, ZeroStageEnum, "mro")}, path)
    for read in READERS:
        found = read(path)
        assert (found["named"], found["given"]) == (2, 3)
        assert isinstance(found["none"], inert.Unknown)


def test_unknown_classes_are_inert(tmp_path: Path) -> None:
    path = tmp_path / "own.pt"
    inside = torch.arange(3.0)
    values = {
        **{"args": argparse.Namespace(lr=0.1, t=inside), "e": Colour.RED, "mine": Mine()},
        **{"class": Mine, "path": Path("a"), "called": Call(getattr, "a", "upper")},
        **{"slice": slice(1, 2), "range": range(10**15), "array": np.array([None])[:0]},
    }
    del values["array"]
    torch.save(values, path)
    for read in READERS:
        found = read(path)
        assert all(type(value) is inert.Unknown for value in found.values())
        assert found["args"].lr == 0.1
        assert torch.equal(found["args"].t, inside)
        assert found["mine"].name == f"{__name__}.Mine"
        assert found["e"].name == f"{__name__}.Colour"
        assert found["e"].arguments in ((1,), ("RED",))  # by Python's version
        with pytest.raises(AttributeError, match=r"made of a pickled argparse\.Namespace"):
            found["args"].momentum  # noqa: B018
        unknown = [where for where, v in inert.walk(found) if isinstance(v, inert.Unknown)]
        assert {where[0] for where in unknown} == set(values)
    assert isinstance(_trusting(path)["mine"], Mine)


def test_no_code_runs(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    make = (os.mkdir, str(mark))
    code = f"__import__('os').mkdir({str(mark)!r})"
    rebuild: Any = torch._utils._rebuild_tensor_v2
    storage = torch.zeros(3).storage()
    values = [
        Call(*make),
        Call(eval, code),
        Call(Call, os.mkdir, str(mark)),
        Call(collections.defaultdict, Call(getattr, "a", "upper")),
        Call(rebuild, storage, 0, (3,), (1,), False, OrderedDict({0: Call(*make)})),
        Call(torch._tensor._rebuild_from_type_v2, os.mkdir, str, (str(mark),), None),  # type: ignore
        Call(torch._tensor._rebuild_from_type_v2, os.mkdir, torch.Tensor, (str(mark),), {}),  # type: ignore
        Call(torch.storage._load_from_bytes, pickle.dumps(Call(*make))),  # type: ignore
        Call(np.ndarray, (1,), state={"__reduce__": os.mkdir}),
        Call(OrderedDict, state={"items": os.mkdir}),
        Call(argparse.Namespace, state={"__class__": os.mkdir, "__setstate__": os.mkdir}),
        Call(map, os.mkdir, [str(mark)]),
        Call(set, Call(map, os.mkdir, [str(mark)])),
    ]
    raw = [
        b"ios\nmkdir\n(V" + str(mark).encode() + b"\nR.",
        b"(V" + str(mark).encode() + b"\nios\nmkdir\n.",
        b"(cos\nmkdir\nV" + str(mark).encode() + b"\no.",
        b"cos\nmkdir\n(V" + str(mark).encode() + b"\nt\x81.",
        b"cos\nmkdir\n(V" + str(mark).encode() + b"\nt}\x92.",
        b"\x80\x04\x8c\x02os\x8c\x05mkdir\x93(V" + str(mark).encode() + b"\ntR.",
        b"\x82\x01.", b"\x83\x01\x00.", b"\x84\x01\x00\x00\x00.", b"Pa\n.", b"\x97.", b"\x98.",
    ]  # fmt: skip
    raw += [_pickled(value, tmp_path) for value in values]
    for content in raw:
        for read in READERS:
            with contextlib.suppress(CheckpointError):
                list(inert.walk(read(_file(tmp_path, content))))
            assert not mark.exists(), content
    _trusting(_file(tmp_path, raw[-len(values)]))
    assert mark.exists()  # it would have been seen


def _pickled(value: object, tmp_path: Path) -> bytes:
    torch.save(value, tmp_path / "value.pt")
    with zipfile.ZipFile(tmp_path / "value.pt") as archive:
        return archive.read("value/data.pkl")


def _file(
    folder: Path, content: bytes, records: dict[str, bytes] | None = None, method: int = 0
) -> Path:
    """An archive as torch's, of a pickle and records."""
    path = folder / "made.pt"
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("made/data.pkl", content)
        archive.writestr("made/version", "3\n")
        for key, record in {"0": bytes(12), **(records or {})}.items():
            archive.writestr(f"made/data/{key}", record)
    return path


def _storage(numel: int, key: str = "0") -> bytes:
    """A pickle of a storage that says that it has so many elements."""
    stream = io.BytesIO()

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return None if obj != "here" else ("storage", torch.FloatStorage, key, "cpu", numel)

    Pickler(stream, 2).dump(("here",))
    return stream.getvalue()


def _repeated(one: bytes, times: int) -> bytes:
    return one * times


_LARGE_DICT = b"}q\x00(" + b"".join(b"Vk%d\nN" % at for at in range(2000)) + b"u0"

SMALL_AND_LARGE = {
    "bytearray": b"c__builtin__\nbytearray\n(J\xff\xff\xff\x7ftR.",
    "long": b"\x80\x02\x8b\xff\xff\xff\x7f1.",
    "digits": b"L" + b"9" * 200 + b"L\n.",
    "memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "range": b"c__builtin__\nlist\n(c__builtin__\nrange\n(J\xff\xff\xff\x7ftRtR.",
    "multiply": b"coperator\nmul\n(V" + b"a" * 50 + b"\nJ\xff\xff\xff\x7ftR.",
    "copies": b"(" + b"N" * 20000 + b"tq\x00" + b"c__builtin__\nset\n(h\x00tR0" * 4000 + b"N.",
    "encoded": b"V" + b"a" * 50000 + b"\nq\x00"
    + b"c_codecs\nencode\n(h\x00Vlatin1\ntR" * 20000 + b".",
    "hash": b"Nq\x00" + _repeated(b"0(h\x00h\x00h\x00h\x00tq\x00", 60) + b"0}h\x00Ns.",
    "hash of a set": b"Nq\x00" + _repeated(b"0(h\x00h\x00h\x00tq\x00", 60)
    + b"0c__builtin__\nset\n(]h\x00atR.",
    "fields": _LARGE_DICT + b"(" + b"ca\nb\nh\x00b" * 4000 + b"t.",
    "attributes": _LARGE_DICT + b"(" + b"ccollections\nOrderedDict\n)Rh\x00b" * 4000 + b"t.",
    "arguments": b"(" + b"N" * 2000 + b"tq\x000(" + b"c__builtin__\ngetattr\nh\x00R" * 4000 + b"t.",
    "walk": b"Nq\x00" + _repeated(b"0]q\x01h\x00ah\x00aq\x00", 60) + b"0h\x00.",
    "deep": b"]" * 30000 + b"a" * 29999 + b".",
    "array": b"cnumpy._core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tVb\ntR"
    + b"(K\x01(J\xff\xff\xff\x7ftcnumpy\ndtype\n(Vf8\ntR\x89Vab\ntb.",
    "storage": _storage(2**30),
    "negative": _storage(-(2**30)),
    "no record": _storage(3, "1"),
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL_AND_LARGE)
def test_a_small_file_takes_little(name: str, tmp_path: Path) -> None:
    path = _file(tmp_path, SMALL_AND_LARGE[name])
    tracemalloc.start()
    try:
        for read in READERS:
            with contextlib.suppress(CheckpointError, pickle.UnpicklingError):
                list(inert.walk(read(path)))
        assert tracemalloc.get_traced_memory()[1] < 5e6 + 300 * path.stat().st_size
    finally:
        tracemalloc.stop()


def test_an_unknown_object_does_not_say_where_memory_is(tmp_path: Path) -> None:
    """numpy asks instances for it where they are to become a number of an array."""
    memory = np.arange(3.0)
    stranger = argparse.Namespace()
    vars(stranger)["__array_interface__"] = memory.__array_interface__ | {"shape": ()}
    torch.save({"stranger": stranger}, tmp_path / "t.pt")
    with pytest.raises(TypeError):
        np.zeros(2)[0] = torch_files.load(tmp_path / "t.pt")["stranger"]


def test_records_are_no_larger_than_the_file(tmp_path: Path) -> None:
    bomb = {"0": bytes(2**26)}
    path = _file(tmp_path, _storage(2**24), bomb, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 2**20
    for read in READERS:
        with pytest.raises(CheckpointError, match="compressed"):
            read(path)
    path = _file(tmp_path, _storage(3), {"a": bytes(12)})
    assert torch_files.load(path)[0].size() == 3
    path.write_bytes(path.read_bytes().replace(b"made/data/a", b"made/data/0"))
    with pytest.raises(CheckpointError, match="two records of one name"):
        torch_files.load(path)
    path = _file(tmp_path, _storage(3))
    content = bytearray(path.read_bytes())
    at = content.rindex(b"PK\1\2")
    content[at + 20 : at + 28] = struct.pack("<II", 2**30, 2**30)
    path.write_bytes(content)
    for read in READERS:
        with pytest.raises(CheckpointError, match="more bytes than the file"):
            read(path)


def test_a_tensor_stays_in_its_storage(tmp_path: Path) -> None:
    rebuild: Any = torch._utils._rebuild_tensor_v2
    storage = torch.arange(3.0).storage()
    for offset, size, stride in (
        (1, (3,), (1,)), (0, (4,), (1,)), (0, (2, 2), (2, 1)), (-1, (1,), (1,)), (0, (2,), (-1,)),
        (0, (2**63,), (0,)), (0, (3,), (1, 1)), (3, (1,), (1,)), (0, (True,), (1,)),
        (0, (2,), (2**61,)),
    ):  # fmt: skip
        torch.save(Call(rebuild, storage, offset, size, stride, False, None), tmp_path / "t.pt")
        for read in READERS:
            with pytest.raises(CheckpointError, match="cannot be read"):
                read(tmp_path / "t.pt")


@pytest.mark.parametrize("kind", [set, OrderedDict, collections.Counter, bytes])
def test_elements_of_a_small_storage_are_not_copied(kind: Any, tmp_path: Path) -> None:
    """A stride of zero makes any number of them."""
    rebuild: Any = torch._utils._rebuild_tensor_v2
    many = Call(rebuild, torch.arange(3.0).storage(), 0, (2**50,), (0,), False, None)
    torch.save(Call(kind, [many]), tmp_path / "t.pt")
    for read in READERS:
        with pytest.raises(CheckpointError, match="elements of a tensor"):
            read(tmp_path / "t.pt")


def test_torch_load_is_replaced_in_this_thread_only(tmp_path: Path) -> None:
    import threading

    torch.save({"mine": Mine()}, tmp_path / "t.pt")
    original, kinds = torch.load, []

    def load() -> None:
        kinds.append(type(torch.load(tmp_path / "t.pt", weights_only=False)["mine"]))

    with torch_files.in_place_of_torch_load():
        load()
        thread = threading.Thread(target=load)
        thread.start()
        thread.join()
    assert kinds == [inert.Unknown, Mine]
    assert torch.load is original
