"""GGUF files hold the values that their writer returns: by the definition, by gguf, and as transformers loads them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.formats.checkpoint import random_weight, save_source
from tests.formats.gguf import FILE, gguf_name, permute_rows, restore_rows, write_gguf
from tests.formats.gguf_blocks import FILE_TYPES, SIZES, TYPES, decode
from tests.formats.layers import relative_error

ERRORS = {"Q8_0": 0.01, "Q4_0": 0.15, "Q4_K": 0.1, "Q5_K": 0.05, "Q6_K": 0.04, "MXFP4": 0.2}


@pytest.mark.parametrize("kind", ERRORS)
def test_the_returned_weight_is_the_stored_one_by_definition(kind: str) -> None:
    weight = random_weight(4, 512)
    blocks = TYPES[kind].quantise(weight)
    torch.testing.assert_close(decode(kind, blocks.data), blocks.weight, rtol=1e-5, atol=1e-7)
    assert 0.001 < relative_error(blocks.weight, weight) < ERRORS[kind]


@pytest.mark.parametrize("kind", ERRORS)
def test_the_returned_weight_is_that_of_gguf(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    blocks = TYPES[kind].quantise(random_weight(4, 512))
    weight = gguf.quants.dequantize(blocks.data.numpy(), gguf.GGMLQuantizationType[kind])
    torch.testing.assert_close(torch.from_numpy(weight), blocks.weight, rtol=1e-5, atol=1e-7)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """transformers 5.23 does not read the head dimension of Qwen3 from the file: it is 128."""
    folder = tmp_path_factory.mktemp("gguf")
    save = partial(save_source, intermediate_size=512)
    heads = {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    return {"llama": save(folder / "llama"), "qwen3": save(folder / "qwen3", "qwen3", **heads)}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", FILE_TYPES)
def test_the_tensors_of_a_file_are_those_of_gguf(
    family: str, kind: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    gguf = pytest.importorskip("gguf")
    dense = write_gguf(sources[family], tmp_path / "stored", kind)
    reader = gguf.GGUFReader(tmp_path / "stored" / FILE)
    assert reader.get_field("general.architecture").contents() == family
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert tensors.keys() == {gguf_name(name) for name in dense}
    assert tensors["blk.1.attn_q.weight"].tensor_type.name == FILE_TYPES[kind][1]
    assert tensors["blk.1.ffn_down.weight"].tensor_type.name == FILE_TYPES[kind][2]
    for name, weight in dense.items():
        tensor = tensors[gguf_name(name)]
        read = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).view(weight.shape)
        heads = {"attn_q": 8, "attn_k": 2}.get(gguf_name(name).split(".")[-2])
        read = restore_rows(read, heads) if heads and family == "llama" else read
        torch.testing.assert_close(read.float(), weight, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("architecture", "family"),
    [
        ("LLAMA", "llama"), ("LLAMA", "mixtral"), ("QWEN2", "qwen2"), ("QWEN3", "qwen3"), ("QWEN2MOE", "qwen2_moe"),
        ("QWEN3MOE", "qwen3_moe"), ("GEMMA2", "gemma2"), ("GEMMA3", "gemma3_text"), ("PHI3", "phi3"),
        ("GPT_OSS", "gpt_oss"),
    ],
)  # fmt: skip
def test_the_names_of_tensors_are_those_of_gguf(architecture: str, family: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    dense = write_gguf(save_source(tmp_path / "source", family), tmp_path / "stored", "Q8_0")
    arch = gguf.MODEL_ARCH[architecture]
    known = {gguf.TENSOR_NAMES[part].format(bid=layer) for part in gguf.MODEL_TENSORS[arch] for layer in range(2)}
    reader = gguf.GGUFReader(tmp_path / "stored" / FILE)
    assert reader.get_field("general.architecture").contents() == gguf.MODEL_ARCH_NAMES[arch]
    assert {tensor.name.rpartition(".")[0] for tensor in reader.tensors} <= known and dense


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_weights_of_a_file_are_those_that_transformers_loads(
    family: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")  # without which transformers reads no GGUF
    dense = write_gguf(sources[family], tmp_path / "stored", "Q4_K_M")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "stored", gguf_file=FILE, dtype=torch.float32)
    weights = model.state_dict()
    assert weights.keys() == dense.keys()
    for name, weight in dense.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-7)


def test_rows_of_a_head_are_permuted_and_restored() -> None:
    weight = torch.arange(16.0)[:, None]
    assert permute_rows(weight, 2).flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15]
    assert torch.equal(restore_rows(permute_rows(weight, 2), 2), weight)


def test_every_kind_of_blocks_that_is_written_has_a_definition() -> None:
    assert {kind for kind in TYPES if kind not in ("F32", "F16", "BF16")} <= SIZES.keys()
