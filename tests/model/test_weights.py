"""The loader: formats, shards, and the refusal of every file that is not exactly the checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsparkd.errors import CheckpointError, InvariantError
from dsparkd.kernels.weight import Format, decode, decode_e8m0, decode_fp4, decode_fp8
from dsparkd.model.checkpoint import Use, expected_tensors
from dsparkd.model.config import load_model_config, parse_model_config
from dsparkd.model.weights import Checkpoint, load_transformer
from tests.model.values import small_values
from tools.number_formats import encode_fp4, encode_fp8
from tools.oracle import read_official
from tools.random_checkpoint import write_checkpoint

CPU = torch.device("cpu")


def test_e8m0_codes_are_powers_of_two() -> None:
    """b is 2 ** (b - 127), 0 the subnormal 2 ** -127, 255 NaN."""
    values = decode_e8m0(torch.arange(256, dtype=torch.uint8)).double()
    assert torch.equal(values[:255], torch.exp2(torch.arange(255).double() - 127))
    assert values[255].isnan()


def test_fp4_codes_have_the_low_nibble_in_the_even_column() -> None:
    """Codes 0..7 are 0, .5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign; a scale covers 32 columns."""
    weight = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2 + [0x21]], dtype=torch.uint8)
    values = decode_fp4(weight.view(torch.int8), torch.tensor([[2.0, 8.0]]))
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    one = torch.tensor([*magnitudes, *(-m for m in magnitudes)])
    assert torch.equal(values[0, :32], 2 * torch.cat((one, one)))
    assert values[0, 32:].tolist() == [8 * 0.5, 8 * 1.0]


def test_fp8_blocks_are_scaled_row_and_column_wise() -> None:
    """One scale a 128 x 128 block, the last ones cut."""
    weight = torch.ones((130, 260)).to(torch.float8_e4m3fn)
    scale = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    values = decode_fp8(weight, scale)
    assert values[[0, 0, 0, 129, 129, 129], [0, 128, 259, 127, 255, 256]].tolist() == [1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize("seed", range(3))
def test_what_the_writer_encodes_is_decoded_to_the_nearest_value(seed: int) -> None:
    """The error of a round trip is at most half a step of the format, at that scale."""
    values = torch.randn((70, 90), generator=torch.Generator().manual_seed(seed))
    codes, scale = encode_fp4(values)
    scales = decode_e8m0(scale.view(torch.uint8))
    step = scales.repeat_interleave(32, 1)[:, :90]
    assert ((decode_fp4(codes, scales) - values).abs() <= step).all()
    weight, scale = encode_fp8(values)
    decoded = decode_fp8(weight, decode_e8m0(scale.view(torch.uint8)))
    assert ((decoded - values).abs() <= values.abs() / 16 + 2.0**-9).all()


def test_two_readers_agree_on_every_tensor(small_checkpoint: Path) -> None:
    """The loader and the oracle's reader share no code; every dequantised value must be the same."""
    config = load_model_config(small_checkpoint)
    theirs = read_official(small_checkpoint)
    specs = expected_tensors(config)
    with Checkpoint(small_checkpoint, config, torch.float32, CPU, (0, 1)) as checkpoint:
        for name, spec in specs.items():
            if spec.use is Use.DRAFT or name.endswith(".scale"):
                continue
            if name.endswith(".weight"):
                ours = checkpoint.linear(name.removesuffix(".weight"))
            elif name.endswith("tid2eid"):
                ours = checkpoint.integer(name)
            else:
                ours = checkpoint.float32(name)
            assert torch.equal(ours, torch.from_numpy(theirs[name])), name
        checkpoint.finish()


def test_a_rank_reads_its_half_of_the_experts_and_says_how_far_it_is(small_checkpoint: Path) -> None:
    """Progress ends at the total; both ranks together read each expert once."""
    config = load_model_config(small_checkpoint)
    totals = []
    for rank in (0, 1):
        seen: list[tuple[int, int]] = []

        def note(done: int, total: int, seen: list[tuple[int, int]] = seen) -> None:
            seen.append((done, total))

        load_transformer(small_checkpoint, config, torch.float32, CPU, rank, note)
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)
        assert seen[-1][0] == seen[-1][1]
        totals.append(seen[-1][1])
    specs = expected_tensors(config)
    experts = sum(
        torch.Size(spec.shape).numel() for spec in specs.values() if spec.use is Use.EXPERT
    )  # one byte an element, packed or scale
    with Checkpoint(small_checkpoint, config, torch.float32, CPU, (0, 1)) as both:
        assert sum(totals) + experts == 2 * both._total_bytes
    assert totals[0] == totals[1]


def anonymous_bytes() -> int:
    """Memory of this process that no file stands behind."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = [line for line in status.splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) << 10


def test_a_load_takes_no_memory_of_its_own_for_what_it_reads(tmp_path: Path) -> None:
    """A checkpoint of 160 GB goes through a host that has less: files are mapped, and tensors leave from there."""
    write_checkpoint(tmp_path, small_values(vocab_size=131072), seed=1)
    config = load_model_config(tmp_path)
    held: list[int] = []

    def note(done: int, total: int) -> None:
        held.append(anonymous_bytes())

    with Checkpoint(tmp_path, config, torch.bfloat16, torch.device("meta"), (0, 1), note) as checkpoint:
        before = anonymous_bytes()
        placed = [checkpoint.linear(name) for name in ("embed", "head")]  # 16 MiB each
        placed += [checkpoint.integer(f"layers.{layer}.ffn.gate.tid2eid") for layer in (0, 1)]
    assert sum(tensor.numel() * tensor.itemsize for tensor in placed) > 32 << 20
    assert max(held) - before < 2 << 20


def test_a_tensor_that_no_layer_takes_is_noticed(small_checkpoint: Path) -> None:
    """None left over: a name that the model forgets would be a silent wrong model."""
    config = load_model_config(small_checkpoint)
    with Checkpoint(small_checkpoint, config, torch.float32, CPU, (0,)) as checkpoint:
        with pytest.raises(InvariantError, match="not loaded"):
            checkpoint.finish()
        checkpoint.linear("embed")
        with pytest.raises(InvariantError, match=r"embed\.weight is read twice"):
            checkpoint.linear("embed")


@pytest.fixture(scope="module")
def single_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("single")
    write_checkpoint(directory, small_values(), seed=5)
    return directory


def rewrite(source: Path, target: Path, changed: dict[str, Tensor | None]) -> None:
    """Copy a one-file checkpoint with some tensors replaced, added or, for None, dropped."""
    tensors = load_file(source / "model.safetensors")
    for name, tensor in changed.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    shutil.copy(source / "config.json", target / "config.json")
    save_file(tensors, target / "model.safetensors")


def load(directory: Path) -> None:
    load_transformer(directory, load_model_config(directory), torch.float32, CPU, 0)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("layers.1.attn.wq_a.weight", None, "missing tensor layers.1.attn.wq_a.weight"),
        ("layers.1.attn.wq_a.scale", None, "missing tensor layers.1.attn.wq_a.scale"),
        ("layers.5.ffn.experts.7.w2.weight", None, "missing tensor layers.5.ffn.experts.7.w2.weight"),
        ("mtp.2.markov_head.markov_w1.weight", None, "missing tensor mtp.2.markov_head.markov_w1.weight"),
        ("layers.9.attn_norm.weight", torch.ones(64), "unknown tensor layers.9.attn_norm.weight"),
        ("mtp.3.norm.weight", torch.ones(64), "unknown tensor mtp.3.norm.weight"),
        ("norm.weight", torch.ones(64), "tensor norm.weight is F32, expected BF16"),
        ("norm.weight", torch.ones(65).bfloat16(), "tensor norm.weight has shape [65], expected [64]"),
        ("mtp.0.main_norm.weight", torch.ones(63).bfloat16(), "tensor mtp.0.main_norm.weight has shape [63]"),
        ("layers.0.attn.attn_sink", torch.ones(8, 1), "tensor layers.0.attn.attn_sink has shape [8, 1]"),
    ],
)
def test_a_wrong_tensor_is_named(
    single_file: Path, tmp_path: Path, name: str, tensor: Tensor | None, message: str
) -> None:
    """A missing, extra, mis-shaped or mis-typed tensor is a start failure, also outside this rank's shard."""
    rewrite(single_file, tmp_path, {name: tensor})
    with pytest.raises(CheckpointError) as failure:
        load(tmp_path)
    assert message in str(failure.value)


def test_a_missing_or_broken_file_is_named(single_file: Path, tmp_path: Path) -> None:
    """The error says which file."""
    shutil.copy(single_file / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(tmp_path)
    data = (single_file / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(tmp_path)


def test_an_index_that_the_files_contradict_is_refused(small_checkpoint: Path, tmp_path: Path) -> None:
    """A tensor in another shard than the index says, a shard that is absent, a path outside the directory."""
    shutil.copytree(small_checkpoint, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_bytes())
    shards = sorted(set(index["weight_map"].values()))
    moved = dict(index["weight_map"])
    moved["norm.weight"] = next(shard for shard in shards if shard != moved["norm.weight"])
    for weight_map, message in (
        (moved, "norm.weight"),
        (index["weight_map"] | {"norm.weight": "absent.safetensors"}, "absent.safetensors"),
        (index["weight_map"] | {"norm.weight": "../model.safetensors"}, "plain file name"),
        ({"norm.weight": 3}, "index.json"),
    ):
        path.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path)


def test_a_preview_checkpoints_draft_block_is_recognised_and_not_loaded(tmp_path: Path) -> None:
    """Tensors decide, not num_nextn_predict_layers; a half of the block is an error."""
    values = {key: value for key, value in small_values().items() if not key.startswith("dspark")}
    write_checkpoint(tmp_path / "whole", values, seed=1, nextn=True)
    load(tmp_path / "whole")
    rewrite(tmp_path / "whole", tmp_path, {"mtp.0.hnorm.weight": None})
    with pytest.raises(CheckpointError, match=r"missing tensor mtp\.0\.hnorm\.weight"):
        load(tmp_path)


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_an_unquantised_checkpoint_loads_as_it_is_stored(tmp_path: Path, stored: str) -> None:
    """quantization_config null: no scales, weights in torch_dtype."""
    values = small_values() | {"quantization_config": None, "expert_dtype": None, "torch_dtype": stored}
    write_checkpoint(tmp_path, values, seed=1)
    config = parse_model_config(values)
    with Checkpoint(tmp_path, config, torch.float32, CPU, (0,)) as checkpoint:
        ours = checkpoint.linear("layers.0.ffn.experts.3.w1")
    assert torch.equal(ours, load_file(tmp_path / "model.safetensors")["layers.0.ffn.experts.3.w1.weight"].float())


@pytest.mark.parametrize("name", ["layers.1.attn.wq_b", "layers.1.ffn.experts.3.w2", "layers.1.ffn.shared_experts.w1"])
def test_packed_weights_hold_what_dequantised_ones_do(small_checkpoint: Path, name: str) -> None:
    """In bfloat16, too, to the bit: FP8 with a block's scale for each of its rows, FP4 as stored."""
    config = load_model_config(small_checkpoint)
    with Checkpoint(small_checkpoint, config, torch.bfloat16, CPU, (0, 1)) as checkpoint:
        expected = checkpoint.linear(name)
    with Checkpoint(small_checkpoint, config, torch.bfloat16, CPU, (0, 1)) as checkpoint:
        checkpoint.keeps_packed = True
        packed = checkpoint.weight(name)
    assert packed.format is (Format.FP4 if ".experts." in name else Format.FP8)
    assert packed.shape == tuple(expected.shape)
    assert torch.equal(decode(packed, torch.bfloat16), expected)


def test_factors_of_wide_products_stay_as_stored_where_kernels_multiply_them(small_checkpoint: Path) -> None:
    """bfloat16 values in bfloat16; everywhere else, and what is stored in float32, in float32."""
    config = load_model_config(small_checkpoint)
    names = ("head.weight", "hc_head_fn")
    with Checkpoint(small_checkpoint, config, torch.bfloat16, CPU, (0, 1)) as checkpoint:
        wide = [checkpoint.exact(name) for name in names]
    with Checkpoint(small_checkpoint, config, torch.bfloat16, CPU, (0, 1)) as checkpoint:
        checkpoint.keeps_packed = True
        kept = [checkpoint.exact(name) for name in names]
    assert [tensor.dtype for tensor in (*wide, *kept)] == [torch.float32, torch.float32, torch.bfloat16, torch.float32]
    assert all(torch.equal(ours.float(), theirs) for ours, theirs in zip(kept, wide, strict=True))


def test_weights_are_dequantised_on_the_cpu(small_checkpoint: Path) -> None:
    """Its products are of dense weights, whatever the dtype."""
    config = load_model_config(small_checkpoint)
    with Checkpoint(small_checkpoint, config, torch.bfloat16, CPU, (0, 1)) as checkpoint:
        assert checkpoint.weight("layers.1.attn.wq_b").format is Format.DENSE


@pytest.mark.parametrize(("name", "code"), [("layers.1.attn.wq_b", 135), ("layers.1.ffn.experts.3.w2", 129)])
def test_scales_past_what_kernels_multiply_by_are_refused(
    single_file: Path, tmp_path: Path, name: str, code: int
) -> None:
    """Their factors would overflow in silence."""
    stored = load_file(single_file / "model.safetensors")[f"{name}.scale"]
    scales = torch.full_like(stored.view(torch.uint8), 100)
    for largest, refused in ((code - 1, False), (code, True)):
        scales[0, 0] = largest
        rewrite(single_file, tmp_path, {f"{name}.scale": scales.view(torch.float8_e8m0fnu)})
        with Checkpoint(tmp_path, load_model_config(tmp_path), torch.bfloat16, CPU, (0, 1)) as checkpoint:
            checkpoint.keeps_packed = True
            if refused:
                with pytest.raises(CheckpointError, match=f"{name}.scale has 2 "):
                    checkpoint.weight(name)
            else:
                checkpoint.weight(name)
