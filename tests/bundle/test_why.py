"""Forecasts compared with what torch then does: each case is a forecast followed by a real start.

The cache is filled once, with two prefill and two decode buckets of a small llama. Every case starts from a copy of it
in a forked process (tests/fork_server.py), with zero or more changes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.bundle.why import forecast, merge_forecasts, version_differences
from tcdeploy.cache.folder.layout import manifest_path
from tcdeploy.cache.record.manifest import Manifest, read_manifest
from tcdeploy.planning.bucket_record import Trial
from tcdeploy.planning.environment import Environment, lists_to_tuples, parse_environment
from tcdeploy.planning.plan import Bucket, Plan, make_plan
from tests.bundle.forecast_runs import forecast_and_start
from tests.conftest import ROOT, remove_headers
from tests.fork_server import ForkServer
from tests.machines import LLAMA_8B, changed_environment, make_recipe
from tests.model_families import save_config

SMALL = {"buckets": "16", "batch_sizes": "1"}  # a subset of the cached buckets, quick to start and to recompile


@dataclasses.dataclass(frozen=True)
class Case:
    """Changes relative to the run that filled the cache; `misses` are the buckets that torch must compile.

    Changes that must not cause a miss share one case.
    """

    name: str
    misses: tuple[str, ...] = ()
    flags: dict[str, Any] = dataclasses.field(default_factory=dict)
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    before: str = ""  # run in the process before the start


ALL = ("prefill:16", "decode:1")
INDUCTOR = "import torch._inductor.config as c; "
CASES = [
    Case("nothing", flags={"buckets": "16,48", "batch_sizes": "1,3"}),
    Case(
        "context, KV blocks, prefill burst, fewer buckets",
        flags={"context": 200, "kv_blocks": 40, "max_consecutive_prefills": 8, "buckets": "48", "batch_sizes": "3"},
    ),
    Case(
        "longer and shorter buckets, another batch size", ("prefill:64", "prefill:32", "decode:5"),
        {"buckets": "16,32,64", "batch_sizes": "1,5"},
    ),
    Case("a dynamic range", ("prefill:2-48",), {"buckets": "48", "shapes": "dynamic"}),
    Case("dtype", ALL, {"dtype": "bfloat16"}),
    Case("block size", ALL, {"block_size": 32}),
    Case("mode default, graphs none", flags={"mode": "default", "graphs": "none"}),
    Case("mode max-autotune", ALL, {"mode": "max-autotune"}),
    Case(
        "another mode with the same variants, attention set to its default",
        flags={"mode": "reduce-overhead", "attention": "reference"},
    ),
    Case("region blocks", ALL, {"region": "blocks"}),
    Case(
        "layers, rotary base, vocabulary, longest position, tied embeddings",
        config={
            "num_hidden_layers": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
            "vocab_size": 300, "max_position_embeddings": 1024, "tie_word_embeddings": True,
        },
    ),
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
    Case("tag of the cache key", ALL, before="import torch; torch.compiler.config.cache_key_tag = 'x'"),
    Case("context, layers, a bucket", ("prefill:64",), {"context": 200, "buckets": "16,64"}, {"num_hidden_layers": 1}),
    Case("batch size and epsilon", ("prefill:16", "decode:2"), {"batch_sizes": "2"}, {"rms_norm_eps": 1e-5}),
]  # fmt: skip


# One of each kind: equal flags, a new range, a new mode with equal programs, configs that hit and miss, and settings of
# the process that miss and hit. scripts/test --long runs all.
ALWAYS = {0, 3, 6, 10, 11, 19, 20}


class Cached:
    """A filled cache. Each start uses a copy of it."""

    def __init__(self, work_dir: Path, fork_server: ForkServer) -> None:
        self.work_dir, self.fork_server, self.copies = work_dir, fork_server, 0
        self.model = self.config("model")
        self.folder = work_dir / "filled"
        self.flags = {"model": self.model, "load_format": "dummy"}
        flags = {**self.flags, "buckets": "16,48", "batch_sizes": "1,3", "cache_dir": str(self.folder)}
        filled = forecast_and_start(self.fork_server, work_dir, flags=flags, cached=str(self.folder))
        assert set(filled["outcomes"].values()) == {"miss"}
        assert "forecast" not in filled, "no manifest existed before"
        remove_headers(self.folder)

    def config(self, name: str, **changes: Any) -> str:
        return save_config("llama", self.work_dir / name, **{"num_hidden_layers": 2, **changes})

    def start(self, case: Case) -> dict[str, Any]:
        self.copies += 1
        copy = self.work_dir / f"copy{self.copies}"
        shutil.copytree(self.folder, copy)
        model = self.config(f"model{self.copies}", **case.config) if case.config else self.model
        flags = {**self.flags, **SMALL, **case.flags, "model": model, "cache_dir": str(copy)}
        return forecast_and_start(
            self.fork_server, self.work_dir, flags=flags, cached=str(self.folder), before=case.before
        )


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Cached:
    return Cached(tmp_path_factory.mktemp("why"), fork_server)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name.replace(" ", "-"), marks=() if number in ALWAYS else pytest.mark.long)
        for number, case in enumerate(CASES)
    ],
)
def test_the_forecast_matches_what_torch_does(cached: Cached, case: Case) -> None:
    result = cached.start(case)
    missed = {bucket for bucket, outcome in result["outcomes"].items() if outcome != "hit"}
    assert missed == set(case.misses), "the actual misses"
    assert {bucket for bucket, predicted in result["forecast"].items() if predicted != "hit"} == missed, result[
        "reasons"
    ]
    assert all(bool(reasons) == (bucket in missed) for bucket, reasons in result["reasons"].items())


# Properties of the machine, which a test cannot change: forecast from a modified environment


@pytest.fixture(scope="module")
def manifest(cached: Cached) -> Manifest:
    (path,) = (cached.folder / "manifests").glob("*.json")
    filled_manifest = read_manifest(path)
    assert filled_manifest is not None
    return filled_manifest


def planned(manifest: Manifest) -> tuple[Plan, Environment]:
    """The plan and the environment of the manifest."""
    environment = parse_environment(json.loads(json.dumps(manifest.environment)))
    plan = lists_to_tuples(manifest.plan)
    buckets = tuple(Bucket(**bucket) for bucket in manifest.plan["buckets"])
    return Plan(**{**plan, "buckets": buckets, "decisions": ()}), environment


@pytest.mark.parametrize(
    ("factor", "value"),
    [
        ("torch", "2.12.0"), ("triton", "3.6.0"), ("python", "3.13.1"), ("transformers", "5.17.0"), ("cuda", "13.0"),
        ("compiler", "g++ 13.1.0"), ("cpu", "VSX"), ("cpu_threads", 64), ("install_paths", "/opt/python /opt/torch"),
        ("gpu", "NVIDIA H100 80GB HBM3"), ("gpu_capability", (9, 0)), ("gpu_multiprocessors", 132),
        ("flash_packages", (("flash-attn-4", "4.0.0"),)),
    ],
)  # fmt: skip
def test_a_difference_of_the_machine_misses_every_bucket_and_is_named(
    manifest: Manifest, factor: str, value: Any
) -> None:
    plan, environment = planned(manifest)
    changed = changed_environment(environment, **{factor: value})
    predicted = forecast(manifest, plan, changed, manifest.origin)
    assert len(predicted.misses) == 4
    assert factor in [difference.name for difference in predicted.differences]
    assert all(factor in bucket.reasons for bucket in predicted.misses)
    assert predicted.miss_seconds == pytest.approx(sum(manifest.cold_seconds().values()))
    assert not any(bucket.is_estimate for bucket in predicted.misses)


@pytest.mark.parametrize("factor", ["driver", "gpu_memory_bytes", "host_memory_bytes", "user_cache_dir"])
def test_inputs_that_are_in_no_program_do_not_change_the_forecast(manifest: Manifest, factor: str) -> None:
    plan, environment = planned(manifest)
    changed = changed_environment(environment, **{factor: "575.1" if factor in ("driver", "user_cache_dir") else 1})
    assert forecast(manifest, plan, changed, manifest.origin).misses == ()


def test_ahead_of_time_packages_of_another_plan_miss(manifest: Manifest) -> None:
    plan, environment = planned(manifest)
    aot_plan = dataclasses.replace(plan, programs="aot")
    aot_manifest = dataclasses.replace(manifest, plan={**manifest.plan, "programs": "aot"})
    assert forecast(aot_manifest, aot_plan, environment, manifest.origin).misses == ()
    other_plan = dataclasses.replace(aot_plan, key="0" * 16)
    predicted = forecast(aot_manifest, other_plan, environment, manifest.origin)
    assert [bucket.reasons for bucket in predicted.misses] == [
        ("ahead-of-time packages belong to one plan, and this is another",)
    ] * 4


def test_another_patch_release_of_python_hits(manifest: Manifest) -> None:
    plan, environment = planned(manifest)
    patched = ".".join([*environment.python.split(".")[:2], "99"])
    assert forecast(manifest, plan, dataclasses.replace(environment, python=patched), manifest.origin).misses == ()


def test_on_a_gpu_the_cpu_and_the_compiler_do_not_matter(manifest: Manifest) -> None:
    plan, environment = planned(manifest)
    there = changed_environment(environment, gpu="NVIDIA H100 80GB HBM3")
    gpu_manifest = dataclasses.replace(manifest, environment=dataclasses.asdict(there))
    here = dataclasses.replace(there, cpu_threads=96, compiler="", cpu="VSX", install_paths="/elsewhere")
    assert forecast(gpu_manifest, plan, here, manifest.origin).misses == ()


def test_other_sources_of_our_ops_are_a_miss_that_names_them(manifest: Manifest) -> None:
    plan, environment = planned(manifest)
    other = dataclasses.replace(manifest.origin, sources={"kernels/linear/ops.py": "0" * 64})
    predicted = forecast(manifest, plan, environment, other)
    assert len(predicted.misses) == 4
    assert "tcdeploy/kernels/linear/ops.py" in [difference.name for difference in predicted.differences]


def test_caches_that_are_switched_off_are_a_miss_that_names_the_setting(manifest: Manifest) -> None:
    """Such a start is refused (start/model_code.py)."""
    plan, environment = planned(manifest)
    settings = {**manifest.origin.torch_settings, "force_disable_caches": "True"}
    other = dataclasses.replace(manifest.origin, torch_settings=settings)
    predicted = forecast(manifest, plan, environment, other)
    assert [bucket.reasons for bucket in predicted.misses] == [("torch.force_disable_caches",)] * 4


def test_an_unknown_bucket_costs_the_median_of_its_phase(manifest: Manifest) -> None:
    plan, environment = planned(manifest)
    more = dataclasses.replace(plan, buckets=(*plan.buckets, Bucket("decode", 9)), key="0" * 16)
    (missed,) = forecast(manifest, more, environment, manifest.origin).misses
    cold = manifest.cold_seconds()
    assert missed.is_estimate and missed.miss_seconds == pytest.approx((cold["decode:1"] + cold["decode:3"]) / 2)


def test_a_bucket_hits_if_any_plan_of_the_folder_has_it(manifest: Manifest) -> None:
    plan, environment = planned(manifest)
    halves = [
        dataclasses.replace(manifest, buckets=manifest.buckets[:2]),
        dataclasses.replace(manifest, buckets=manifest.buckets[2:]),
    ]
    assert all(forecast(half, plan, environment, manifest.origin).misses for half in halves)
    assert merge_forecasts([forecast(half, plan, environment, manifest.origin) for half in halves]).misses == ()


def test_the_rotary_base_matters_if_the_head_is_compiled() -> None:
    """On a GPU in mode max-autotune, the operations before and after the layers are compiled for decode steps."""
    from tests.cache.test_manifest import MANIFEST
    from tests.machines import H100

    plan = make_plan(make_recipe(context=4096, mode="max-autotune", buckets=(512,), batch_sizes=(1,)), H100, LLAMA_8B)
    records = tuple(dataclasses.replace(record, variant="max-autotune") for record in MANIFEST.buckets)
    origin = dataclasses.replace(MANIFEST.origin, model_config={"rope_theta": 10000.0})
    cached = dataclasses.replace(MANIFEST, plan=dataclasses.asdict(plan), origin=origin, buckets=records)
    other = dataclasses.replace(origin, model_config={"rope_theta": 5000.0})
    assert [bucket.bucket for bucket in forecast(cached, plan, H100, other).misses] == ["decode:1"]
    assert forecast(cached, plan, H100, origin).misses == ()


def test_more_tuning_time_is_a_miss_if_variants_were_not_timed() -> None:
    """The plan key excludes the tuning time, but a variant that wins later has to be compiled."""
    from tests.cache.test_manifest import MANIFEST
    from tests.machines import H100

    settings = {"context": 4096, "mode": "auto", "buckets": (512,), "batch_sizes": (1,), "tune_seconds": 10.0}
    plan = make_plan(make_recipe(**settings), H100, LLAMA_8B)
    variants = {bucket.name: [variant.name for variant in plan.variants(bucket)] for bucket in plan.buckets}
    records = tuple(
        dataclasses.replace(
            record, variant=variants[record.bucket][0], trials=(Trial(variants[record.bucket][0], 5.0, 1.0),)
        )
        for record in MANIFEST.buckets
    )
    cached = dataclasses.replace(MANIFEST, plan=dataclasses.asdict(plan), buckets=records)
    longer = make_plan(make_recipe(**{**settings, "tune_seconds": 300.0}), H100, LLAMA_8B)
    assert longer.key == plan.key
    assert forecast(cached, plan, H100, cached.origin).misses == ()
    missed = forecast(cached, longer, H100, cached.origin).misses
    assert (
        {bucket.bucket for bucket in missed}
        == {name for name, choices in variants.items() if len(choices) > 1}
        != set()
    )
    assert all(bucket.reasons == ("mode auto has time for variants that were not timed",) for bucket in missed)


def test_versions_are_compared_without_torch(manifest: Manifest) -> None:
    there = manifest.environment
    installed = {
        "python": ".".join(there["python"].split(".")[:2]),
        "torch": f"{there['torch'].partition('+')[0]}+cu130",
    }
    assert version_differences(manifest, installed) == ()
    (factor,) = version_differences(manifest, {**installed, "triton": "1.0"})
    assert (factor.name, factor.here, factor.there) == ("triton", "1.0", there["triton"])


def test_packages_need_no_transformers_but_then_the_same_patch_level_of_python(manifest: Manifest) -> None:
    """The start without transformers reads a record, whose name contains the complete version of Python."""
    packages = dataclasses.replace(manifest, plan={**manifest.plan, "programs": "aot"})
    there, minor = manifest.environment, manifest.environment["python"].rpartition(".")[0]
    for python, cached, expected in (
        (there["python"], packages, []),
        (there["python"], manifest, ["transformers"]),
        (f"{minor}.99", packages, ["python"]),
        (f"{minor}.99", manifest, ["transformers"]),
    ):
        differences = version_differences(cached, {"python": python, "transformers": ""})
        assert [difference.name for difference in differences] == expected
    installed = {"python": f"{minor}.99", "transformers": there["transformers"]}
    assert version_differences(packages, installed) == ()


def test_packages_need_triton_on_a_gpu_only(manifest: Manifest) -> None:
    installed = {"python": manifest.environment["python"], "triton": ""}
    on_a_gpu = dataclasses.asdict(changed_environment(parse_environment(manifest.environment), gpu="NVIDIA H100"))
    for programs, environment, expected in (
        ("aot", manifest.environment, []),
        ("aot", on_a_gpu, ["triton"]),
        ("jit", manifest.environment, ["triton"]),
    ):
        cached = dataclasses.replace(manifest, plan={**manifest.plan, "programs": programs}, environment=environment)
        assert [difference.name for difference in version_differences(cached, installed)] == expected


# The command


def test_the_command_lists_misses_and_exits_with_3(cached: Cached, run_cli: Any) -> None:
    hit = run_cli("cache", "why", str(cached.folder))
    assert (hit.returncode, hit.stderr) == (0, "")
    assert hit.stdout.count(" hit ") == 4
    missed = run_cli("cache", "why", str(cached.folder), "--dtype", "bfloat16", "--json")
    assert missed.returncode == 3
    document = json.loads(missed.stdout)
    assert [bucket["is_hit"] for bucket in document["buckets"]] == [False] * 4 and document["miss_seconds"] > 1
    differences = [tuple(difference.values()) for difference in document["differences"]]
    assert ("compute_dtype", "bfloat16", "float32") in differences
    assert "4 of 4 buckets would miss, about" in missed.stderr


def test_the_command_detects_changed_sources_of_its_own_package(cached: Cached, run_cli: Any, tmp_path: Path) -> None:
    package = tmp_path / "changed"
    shutil.copytree(ROOT / "tcdeploy", package / "tcdeploy")
    with open(package / "tcdeploy" / "kernels" / "attention" / "reference.py", "a") as source:
        source.write("CHANGED = True\n")
    done = run_cli("cache", "why", str(cached.folder), PYTHONPATH=str(package), cwd=str(package))
    assert done.returncode == 3 and "tcdeploy/kernels/attention/reference.py" in done.stdout


@pytest.mark.parametrize(
    ("module", "line", "edited"),
    [
        ("models.llama.modeling_llama", "residual + hidden_states\n", "1.0001 * residual + hidden_states\n"),
        pytest.param(  # the model imports a function
            "modeling_rope_utils", "attention_factor = 1.0\n", "attention_factor = 1.5\n", marks=pytest.mark.long
        ),
    ],
)
def test_the_command_detects_an_edit_of_the_models_code(
    cached: Cached, run_cli: Any, tmp_path: Path, module: str, line: str, edited: str
) -> None:
    """The version of transformers is the same, so only the hashes of its files differ."""
    packages = overlay_transformers(tmp_path / "edited", module, line, edited)
    done = run_cli("cache", "why", str(cached.folder), PYTHONPATH=packages)
    assert done.returncode == 3 and f"transformers.{module}" in done.stdout, done.stderr


def overlay_transformers(folder: Path, module: str, line: str, edited: str) -> str:
    """A value of PYTHONPATH with which a process imports transformers with one edited file. The rest are links."""
    import transformers

    original, copy = Path(transformers.__file__).parent, folder / "transformers"
    path = Path(*module.split(".")).with_suffix(".py")
    for parent in reversed(path.parents):
        (copy / parent).mkdir(parents=True)
        edited_names = {(copy / path).relative_to(copy / parent).parts[0], "__pycache__"}
        for item in (original / parent).iterdir():
            if item.name not in edited_names:
                (copy / parent / item.name).symlink_to(item)
    source = (original / path).read_text()
    assert line in source
    (copy / path).write_text(source.replace(line, edited))
    return os.pathsep.join([str(folder), str(ROOT)])


def test_a_folder_without_a_plan_is_refused(run_cli: Any, tmp_path: Path) -> None:
    done = run_cli("cache", "why", str(tmp_path))
    assert done.returncode == 2 and "holds no plan" in done.stderr
    assert manifest_path(tmp_path, "0" * 16).exists() is False
