"""What `why` says before a start, held against what torch then does: each case is a forecast and a real start.

The cache is filled once, with two prefill and two decode buckets of a small llama; every case starts from a copy of it,
in a process as fresh as a new one (forks.py), with one thing changed, or several, or none.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.bundle.why import forecast, merge_forecasts, version_differences
from tcdeploy.cache.manifest import Manifest, Trial, manifest_path, read_manifest
from tcdeploy.planning.environment import Environment
from tcdeploy.planning.plan import Bucket, Plan, make_plan
from tests.bundle.forecast_runs import forecast_and_start
from tests.conftest import ROOT
from tests.fork_server import ForkServer
from tests.machines import LLAMA_8B, make_recipe
from tests.model_families import save_config

SMALL = {"buckets": "16", "batch_sizes": "1"}  # of what is cached: quick to start, and to compile again


@dataclasses.dataclass(frozen=True)
class Case:
    """What is asked otherwise than when the cache was filled; `misses` are the buckets that torch had to compile."""

    name: str
    misses: tuple[str, ...] = ()
    flags: dict[str, Any] = dataclasses.field(default_factory=dict)
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    before: str = ""  # run in the process before the start


ALL = ("prefill:16", "decode:1")
INDUCTOR = "import torch._inductor.config as c; "
CASES = [
    Case("nothing", flags={"buckets": "16,48", "batch_sizes": "1,3"}),
    Case("context", flags={"context": 200}),
    Case("KV blocks", flags={"kv_blocks": 40}),
    Case("prefill burst", flags={"max_consecutive_prefills": 8}),
    Case("fewer buckets", flags={"buckets": "48", "batch_sizes": "3"}),
    Case("a longer bucket", ("prefill:480",), {"buckets": "16,480"}),
    Case("a bucket between", ("prefill:32",), {"buckets": "16,32"}),
    Case("another batch size", ("decode:5",), {"batch_sizes": "1,5"}),
    Case("a dynamic range", ("prefill:2-48",), {"buckets": "48", "shapes": "dynamic"}),
    Case("dtype", ALL, {"dtype": "bfloat16"}),
    Case("block size", ALL, {"block_size": 32}),
    Case("mode default", flags={"mode": "default"}),
    Case("mode max-autotune", ALL, {"mode": "max-autotune"}),
    Case("mode auto without time to try", flags={"mode": "auto", "tune_seconds": 0.0}),
    Case("region blocks", ALL, {"region": "blocks"}),
    Case("graphs none", flags={"graphs": "none"}),
    Case("attention, as it would be chosen", flags={"attention": "reference"}),
    Case("layers", config={"num_hidden_layers": 3}),
    Case("rotary base", config={"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}),
    Case("vocabulary", config={"vocab_size": 300}),
    Case("longest position", config={"max_position_embeddings": 1024}),
    Case("tied embeddings", config={"tie_word_embeddings": True}),
    Case("epsilon of the norms", ALL, config={"rms_norm_eps": 1e-5}),
    Case("hidden size", ALL, config={"hidden_size": 32}),
    Case("width of the MLP", ALL, config={"intermediate_size": 128}),
    Case("KV heads", ALL, config={"num_key_value_heads": 4}),
    Case("activation", ALL, config={"hidden_act": "gelu"}),
    Case("biases", ALL, config={"attention_bias": True}),
    Case("threads", ALL, before="import torch; torch.set_num_threads(2)"),
    Case("deterministic algorithms", ALL, before="import torch; torch.use_deterministic_algorithms(True)"),
    Case("a setting of Inductor", ALL, before=INDUCTOR + "c.epilogue_fusion = False"),
    Case("a setting that makes no difference", before=INDUCTOR + "c.compile_threads = 1"),
    Case("caches switched off", ALL, before=INDUCTOR + "c.force_disable_caches = True"),
    Case("tag of the cache key", ALL, before="import torch; torch.compiler.config.cache_key_tag = 'x'"),
    Case("context, layers, a bucket", ("prefill:64",), {"context": 200, "buckets": "16,64"}, {"num_hidden_layers": 1}),
    Case("layers and dtype", ALL, {"dtype": "bfloat16"}, {"num_hidden_layers": 3}),
    Case("batch size and epsilon", ("prefill:16", "decode:2"), {"batch_sizes": "2"}, {"rms_norm_eps": 1e-5}),
]  # fmt: skip


class Cached:
    """A filled cache, and starts from copies of it."""

    def __init__(self, place: Path, fork_server: ForkServer) -> None:
        self.place, self.fork_server, self.copies = place, fork_server, 0
        self.model = self.config("model")
        self.folder = place / "filled"
        self.flags = {"model": self.model, "load_format": "dummy"}
        asked = {**self.flags, "buckets": "16,48", "batch_sizes": "1,3", "cache_dir": str(self.folder)}
        filled = forecast_and_start(self.fork_server, place, flags=asked, cached=str(self.folder))
        assert set(filled["happened"].values()) == {"miss"}
        assert "forecast" not in filled, "there was nothing to forecast from"

    def config(self, name: str, **changes: Any) -> str:
        return save_config("llama", self.place / name, **{"num_hidden_layers": 2, **changes})

    def start(self, case: Case) -> dict[str, Any]:
        self.copies += 1
        copy = self.place / f"copy{self.copies}"
        shutil.copytree(self.folder, copy)
        model = self.config(f"model{self.copies}", **case.config) if case.config else self.model
        flags = {**self.flags, **SMALL, **case.flags, "model": model, "cache_dir": str(copy)}
        return forecast_and_start(
            self.fork_server, self.place, flags=flags, cached=str(self.folder), before=case.before
        )


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Cached:
    return Cached(tmp_path_factory.mktemp("why"), fork_server)


def test_there_are_enough_cases_of_every_kind() -> None:
    assert len(CASES) >= 30
    assert sum(not case.misses for case in CASES) >= 10
    assert sum(bool(case.misses) for case in CASES) >= 10
    assert sum(bool(case.flags) and bool(case.config) for case in CASES) >= 3


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_the_forecast_is_what_happens(cached: Cached, case: Case) -> None:
    found = cached.start(case)
    missed = {bucket for bucket, outcome in found["happened"].items() if outcome != "hit"}
    assert missed == set(case.misses), "what torch did"
    assert {bucket for bucket, said in found["forecast"].items() if said != "hit"} == missed, found["reasons"]
    assert all(bool(reasons) == (bucket in missed) for bucket, reasons in found["reasons"].items())


# Factors of the machine, which no test can change: told from the record alone


@pytest.fixture(scope="module")
def manifest(cached: Cached) -> Manifest:
    (path,) = (cached.folder / "manifests").glob("*.json")
    found = read_manifest(path)
    assert found is not None
    return found


def planned(manifest: Manifest) -> tuple[Plan, Environment]:
    """The plan and the machine of the manifest, as records."""
    known = json.loads(json.dumps(manifest.environment), object_hook=None)
    environment = Environment(**{name: _lists_to_tuples(value) for name, value in known.items()})
    plan = {name: _lists_to_tuples(value) for name, value in manifest.plan.items()}
    buckets = tuple(Bucket(**bucket) for bucket in manifest.plan["buckets"])
    return Plan(**{**plan, "buckets": buckets, "decisions": ()}), environment


def _lists_to_tuples(value: Any) -> Any:
    return tuple(_lists_to_tuples(one) for one in value) if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("factor", "value"),
    [
        ("torch", "2.12.0"), ("triton", "3.6.0"), ("python", "3.13.1"), ("transformers", "5.17.0"), ("cuda", "13.0"),
        ("compiler", "g++ 13.1.0"), ("cpu", "AVX2"), ("cpu_threads", 64), ("install_paths", "/opt/python /opt/torch"),
        ("gpu", "NVIDIA H100 80GB HBM3"), ("gpu_capability", (9, 0)), ("gpu_multiprocessors", 132),
        ("flash_packages", (("flash-attn-4", "4.0.0"),)),
    ],
)  # fmt: skip
def test_another_machine_is_a_miss_in_every_bucket_and_is_named(manifest: Manifest, factor: str, value: Any) -> None:
    plan, environment = planned(manifest)
    changed = dataclasses.replace(environment, **{factor: value})
    found = forecast(manifest, plan, changed, manifest.origin)
    assert len(found.misses) == 4
    assert factor in [one.name for one in found.differences] and all(factor in one.reasons for one in found.misses)
    assert found.miss_seconds == pytest.approx(sum(manifest.cold_seconds().values()))
    assert not any(one.is_estimate for one in found.misses)


@pytest.mark.parametrize("factor", ["driver", "gpu_memory_bytes", "host_memory_bytes", "user_cache_dir"])
def test_what_no_program_holds_changes_no_forecast(manifest: Manifest, factor: str) -> None:
    plan, environment = planned(manifest)
    changed = dataclasses.replace(environment, **{factor: "575.1" if factor in ("driver", "user_cache_dir") else 1})
    assert forecast(manifest, plan, changed, manifest.origin).misses == ()


def test_another_patch_of_python_is_the_same(manifest: Manifest) -> None:
    plan, environment = planned(manifest)
    patched = ".".join([*environment.python.split(".")[:2], "99"])
    assert forecast(manifest, plan, dataclasses.replace(environment, python=patched), manifest.origin).misses == ()


def test_with_a_gpu_more_cores_and_another_compiler_are_the_same(manifest: Manifest) -> None:
    plan, environment = planned(manifest)
    there = dataclasses.replace(environment, gpu="NVIDIA H100 80GB HBM3")
    made_there = dataclasses.replace(manifest, environment=dataclasses.asdict(there))
    here = dataclasses.replace(there, cpu_threads=96, compiler="", cpu="AVX2", install_paths="/elsewhere")
    assert forecast(made_there, plan, here, manifest.origin).misses == ()


def test_other_sources_of_our_ops_are_a_miss_that_names_them(manifest: Manifest) -> None:
    plan, environment = planned(manifest)
    other = dataclasses.replace(manifest.origin, sources="0" * 64)
    found = forecast(manifest, plan, environment, other)
    assert len(found.misses) == 4 and "tcdeploy's ops" in [one.name for one in found.differences]


def test_a_bucket_that_was_never_compiled_costs_what_its_kind_did(manifest: Manifest) -> None:
    plan, environment = planned(manifest)
    more = dataclasses.replace(plan, buckets=(*plan.buckets, Bucket("decode", 9)), key="0" * 16)
    (missed,) = forecast(manifest, more, environment, manifest.origin).misses
    cold = manifest.cold_seconds()
    assert missed.is_estimate and missed.miss_seconds == pytest.approx((cold["decode:1"] + cold["decode:3"]) / 2)


def test_of_several_plans_a_bucket_is_found_if_any_has_it(manifest: Manifest) -> None:
    plan, environment = planned(manifest)
    halves = [
        dataclasses.replace(manifest, buckets=manifest.buckets[:2]),
        dataclasses.replace(manifest, buckets=manifest.buckets[2:]),
    ]
    assert all(forecast(half, plan, environment, manifest.origin).misses for half in halves)
    assert merge_forecasts([forecast(half, plan, environment, manifest.origin) for half in halves]).misses == ()


def test_a_rotary_base_matters_where_the_edges_are_compiled() -> None:
    """On a GPU in mode max-autotune, a decode step's first and last parts are programs too."""
    from tests.cache.test_manifest import MANIFEST
    from tests.machines import H100

    plan = make_plan(make_recipe(context=4096, mode="max-autotune", buckets=(512,), batch_sizes=(1,)), H100, LLAMA_8B)
    records = tuple(dataclasses.replace(one, variant="max-autotune") for one in MANIFEST.buckets)
    origin = dataclasses.replace(MANIFEST.origin, model_config={"rope_theta": 10000.0})
    made = dataclasses.replace(MANIFEST, plan=dataclasses.asdict(plan), origin=origin, buckets=records)
    other = dataclasses.replace(origin, model_config={"rope_theta": 5000.0})
    assert [one.bucket for one in forecast(made, plan, H100, other).misses] == ["decode:1"]
    assert forecast(made, plan, H100, origin).misses == ()


def test_more_time_to_tune_is_a_miss_where_something_was_left_untried() -> None:
    """The plan's key does not hold the time; what wins after all would have to be compiled."""
    from tests.cache.test_manifest import MANIFEST
    from tests.machines import H100

    asked = {"context": 4096, "mode": "auto", "buckets": (512,), "batch_sizes": (1,), "tune_seconds": 10.0}
    plan = make_plan(make_recipe(**asked), H100, LLAMA_8B)
    names = {bucket.name: [one.name for one in plan.variants(bucket)] for bucket in plan.buckets}
    tried = tuple(
        dataclasses.replace(one, variant=names[one.bucket][0], trials=(Trial(names[one.bucket][0], 5.0, 1.0),))
        for one in MANIFEST.buckets
    )
    made = dataclasses.replace(MANIFEST, plan=dataclasses.asdict(plan), buckets=tried)
    longer = make_plan(make_recipe(**{**asked, "tune_seconds": 300.0}), H100, LLAMA_8B)
    assert longer.key == plan.key
    assert forecast(made, plan, H100, made.origin).misses == ()
    missed = forecast(made, longer, H100, made.origin).misses
    assert {one.bucket for one in missed} == {name for name, all_of_it in names.items() if len(all_of_it) > 1} != set()
    assert all(one.reasons == ("mode auto would try what it had no time for",) for one in missed)


def test_versions_are_compared_without_torch(manifest: Manifest) -> None:
    there = manifest.environment
    installed = {
        "python": ".".join(there["python"].split(".")[:2]),
        "torch": f"{there['torch'].partition('+')[0]}+cu130",
    }
    assert version_differences(manifest, installed) == ()
    (factor,) = version_differences(manifest, {**installed, "triton": "1.0"})
    assert (factor.name, factor.here, factor.there) == ("triton", "1.0", there["triton"])


# The command


def test_the_command_says_what_misses_and_exits_with_3(cached: Cached, run_cli: Any) -> None:
    hit = run_cli("cache", "why", str(cached.folder))
    assert (hit.returncode, hit.stderr) == (0, "")
    assert hit.stdout.count(" hit ") == 4
    missed = run_cli("cache", "why", str(cached.folder), "--dtype", "bfloat16", "--json")
    assert missed.returncode == 3
    document = json.loads(missed.stdout)
    assert [one["is_hit"] for one in document["buckets"]] == [False] * 4 and document["miss_seconds"] > 1
    assert ("dtype", "bfloat16", "float32") in [tuple(one.values()) for one in document["factors"]]
    assert "4 of 4 buckets would miss, about" in missed.stderr


def test_changed_sources_are_forecast_by_the_changed_package_itself(
    cached: Cached, run_cli: Any, tmp_path: Path
) -> None:
    package = tmp_path / "changed"
    shutil.copytree(ROOT / "tcdeploy", package / "tcdeploy")
    with open(package / "tcdeploy" / "attention" / "reference.py", "a") as source:
        source.write("# changed\n")
    done = run_cli("cache", "why", str(cached.folder), PYTHONPATH=str(package), cwd=str(package))
    assert done.returncode == 3 and "tcdeploy's ops" in done.stdout


def test_a_folder_without_a_plan_is_refused(run_cli: Any, tmp_path: Path) -> None:
    done = run_cli("cache", "why", str(tmp_path))
    assert done.returncode == 2 and "holds no plan" in done.stderr
    assert manifest_path(tmp_path, "0" * 16).exists() is False
