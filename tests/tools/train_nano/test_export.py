"""The export: what training rounds is what the files hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dsparkd.model.checkpoint import StoredDtype, Use, expected_tensors
from dsparkd.model.config import load_model_config, parse_model_config
from dsparkd.model.weights import Checkpoint
from tests.model.values import small_values
from tools.number_formats import round_bfloat16
from tools.oracle import read_official
from tools.random_checkpoint import Values, nano_config, random_tensors
from tools.train_nano.export import (
    State,
    Storage,
    export,
    fake_quantise,
    fake_quantise_entry,
    read_state,
    storage,
    without_drafter,
)

CPU = torch.device("cpu")


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Compare by bits, so that 0.0 and -0.0 differ."""
    assert ours.dtype == theirs.dtype
    return torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


def random_state(values: Values, seed: int = 0) -> dict[str, Tensor]:
    """Masters that no format holds exactly, with official names and stacked experts."""
    config = parse_model_config(values)
    plain = values | {"torch_dtype": "float32", "quantization_config": None, "expert_dtype": None}
    generator = torch.Generator().manual_seed(seed)
    drawn = random_tensors(expected_tensors(parse_model_config(plain)), config, seed)
    state: dict[str, Tensor] = {}
    stacks: dict[str, list[Tensor]] = {}
    for name, tensor in drawn.items():
        if tensor.is_floating_point():
            tensor = tensor + 1e-3 * torch.randn(tensor.shape, generator=generator)
            tensor.view(-1)[::29] *= -0.0
        if ".ffn.experts." in name:
            layer, _, rest = name.partition(".ffn.experts.")
            stacks.setdefault(f"{layer}.ffn.experts.{rest.split('.')[1]}", []).append(tensor)
        else:
            state[name] = tensor
    return state | {name: torch.stack(parts) for name, parts in stacks.items()}


def of_expert(state: State, name: str) -> Tensor:
    """Look an official name up in a state, in the stack for an expert's."""
    if ".ffn.experts." not in name:
        return state[name]
    layer, _, rest = name.partition(".ffn.experts.")
    expert, leaf = rest.split(".")[:2]
    return state[f"{layer}.ffn.experts.{leaf}"][int(expert)]


@pytest.fixture(scope="module", params=["small", "nano"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State, State]:
    """A directory, the state that was exported to it, and the same rounded as training rounds it."""
    values = small_values() if request.param == "small" else nano_config(512, 7)
    state = random_state(values)
    directory = tmp_path_factory.mktemp("exported")
    export(state, values, directory)
    return directory, state, {name: fake_quantise(name, tensor) for name, tensor in state.items()}


def test_the_independent_reader_reads_what_training_rounded(exported: tuple[Path, State, State]) -> None:
    """Every tensor, the drafter's too, bit for bit: the weights that gates measure are those that were trained."""
    directory, _, rounded = exported
    read = read_official(directory)
    assert len(read) > 100
    for name, array in read.items():
        assert same_bits(torch.from_numpy(array), of_expert(rounded, name)), name


def test_the_server_reads_what_training_rounded(exported: tuple[Path, State, State]) -> None:
    """Every tensor of the target, bit for bit."""
    directory, _, rounded = exported
    config = load_model_config(directory)
    with Checkpoint(directory, config, torch.float32, CPU, (0, 1)) as checkpoint:
        for name, spec in expected_tensors(config).items():
            if spec.use is Use.DRAFT or name.endswith(".scale"):
                continue
            if spec.dtype is StoredDtype.I64:
                read = checkpoint.integer(name)
            elif name.endswith(".weight"):
                read = checkpoint.linear(name.removesuffix(".weight"))
            else:
                read = checkpoint.float32(name)
            assert same_bits(read, of_expert(rounded, name)), name
        checkpoint.finish()


def test_reading_back_gives_a_state_to_go_on_from(exported: tuple[Path, State, State]) -> None:
    """Names, shapes and bits; exporting that again gives the same file."""
    directory, _, rounded = exported
    state = read_state(directory)
    assert state.keys() == rounded.keys()
    for name, tensor in state.items():
        assert same_bits(tensor, rounded[name]), name


def test_the_files_can_be_read_by_another_user(exported: tuple[Path, State, State]) -> None:
    """A service's or a container's user is not the one who exported or built."""
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in exported[0].iterdir())


def test_exporting_what_was_read_keeps_every_value(exported: tuple[Path, State, State], tmp_path: Path) -> None:
    """Another session goes on from shipped weights without losing a bit. (A scale may become smaller.)"""
    directory, _, rounded = exported
    export(read_state(directory), json.loads((directory / "config.json").read_bytes()), tmp_path)
    for name, tensor in read_state(tmp_path).items():
        assert same_bits(tensor, rounded[name]), name


def test_rounding_changes_what_the_layout_cannot_hold_and_nothing_else(exported: tuple[Path, State, State]) -> None:
    """Were it the identity, the tests above would show nothing."""
    _, state, rounded = exported
    for name, tensor in state.items():
        kept = storage(name) in (Storage.F32, Storage.I64)
        assert torch.equal(tensor, rounded[name]) is kept, name


@pytest.mark.parametrize("values", [small_values(), nano_config(512, 7)])
def test_storage_follows_the_table_of_the_layout(values: Values) -> None:
    """Names are sorted by pattern; the table of every tensor is the rule."""
    kinds = {
        StoredDtype.I8: Storage.FP4,
        StoredDtype.F8_E4M3: Storage.FP8,
        StoredDtype.BF16: Storage.BF16,
        StoredDtype.F32: Storage.F32,
        StoredDtype.I64: Storage.I64,
    }
    for name, spec in expected_tensors(parse_model_config(values)).items():
        if not name.endswith(".scale"):
            if ".ffn.experts." in name:
                layer, _, rest = name.partition(".ffn.experts.")
                name = f"{layer}.ffn.experts.{rest.split('.')[1]}"
            assert storage(name) is kinds[spec.dtype], name


@pytest.mark.parametrize("name", ["layers.0.attn.window", "layers.0.attn.wq_c.weight", "ffn.experts.w4", "weight"])
def test_a_strange_name_has_no_storage(name: str) -> None:
    """Taken for bfloat16, a misspelt linear would be trained without its rounding."""
    with pytest.raises(ValueError, match="no tensor of the official layout"):
        storage(name)


@pytest.mark.parametrize(
    ("suffix", "shape"),
    [
        ("ffn.experts.w1", (3, 16, 128, 256)),
        ("ffn.experts.w1.weight", (3, 16, 128, 256)),
        ("attn.wq_b.weight", (3, 1024, 128)),
        ("attn.compressor.wkv.weight", (3, 256, 64)),
        ("main_proj.weight", (1, 256, 768)),
    ],
)
def test_layers_may_be_stacked_under_their_common_suffix(suffix: str, shape: tuple[int, ...]) -> None:
    """Training rounds all layers in one call: each part must come out as its own would."""
    stack = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    prefix = "mtp.0." if suffix.startswith("main") else "layers.2."
    alone = [fake_quantise(prefix + suffix, part) for part in stack]
    assert same_bits(fake_quantise(suffix, stack), torch.stack(alone))
    assert not same_bits(stack, torch.stack(alone))


def test_a_cached_entry_is_rounded_in_groups_of_64_but_for_its_rotary_columns() -> None:
    """FP8 with one power-of-two scale a group, then bfloat16: each part against torch's casts."""
    entry = torch.randn((5, 3, 192), generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 192)
    rounded = fake_quantise_entry(entry)
    assert torch.equal(rounded[..., 128:], entry[..., 128:].bfloat16().float())
    for start in (0, 64):
        group = entry[..., start : start + 64].double()
        scale = torch.exp2(torch.ceil(torch.log2(group.abs().amax(-1, keepdim=True) / 448)))
        expected = (group / scale).float().to(torch.float8_e4m3fn).double() * scale
        assert torch.equal(rounded[..., start : start + 64].double(), expected)


def test_no_gradient_and_no_graph_break() -> None:
    """It is called every step inside a compiled graph; the caller adds the straight-through gradient."""
    names = ("layers.1.ffn.experts.w1", "layers.1.attn.wq_a.weight", "embed.weight", "layers.2.attn.compressor.ape")

    def step(tensors: list[Tensor]) -> list[Tensor]:
        return [fake_quantise(name, tensor) for name, tensor in zip(names, tensors, strict=True)]

    tensors = [torch.randn(4, 128, 128, requires_grad=True) for _ in names]
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    for eager, traced in zip(step(tensors), compiled(tensors), strict=True):
        assert not eager.requires_grad
        assert same_bits(eager, traced)


def test_bfloat16_masters_are_rounded_as_their_values() -> None:
    """The dtype of a master changes nothing that it cannot hold itself."""
    master = torch.randn(64, 64).bfloat16()
    assert same_bits(fake_quantise("head.weight", master), round_bfloat16(master.float()))


def test_a_state_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    """A missing, strange, misshapen or broken tensor must not become a file."""
    values = small_values()
    state = random_state(values)
    broken = state["layers.0.attn.wq_a.weight"].clone()
    broken[0, 0] = torch.inf
    cases = {
        "no layers.0.ffn.experts.w2": {k: v for k, v in state.items() if k != "layers.0.ffn.experts.w2"},
        "no norm.weight": {k: v for k, v in state.items() if k != "norm.weight"},
        "no place for 1 tensors, layers.9.norm": state | {"layers.9.norm": torch.ones(1)},
        "stacks 7 experts": state | {"layers.0.ffn.experts.w2": state["layers.0.ffn.experts.w2"][:7]},
        r"norm.weight has shape \[3\]": state | {"norm.weight": torch.ones(3)},
        "not finite": state | {"layers.0.attn.wq_a.weight": broken},
    }
    for message, wrong in cases.items():
        with pytest.raises(ValueError, match=message):
            export(wrong, values, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_target_alone_is_exported_without_drafter_keys(tmp_path: Path) -> None:
    """Before a drafter is trained the target must be servable."""
    values = small_values()
    target = {name: tensor for name, tensor in random_state(values).items() if not name.startswith("mtp.")}
    export(target, without_drafter(values), tmp_path)
    assert load_model_config(tmp_path).dspark is None
    assert read_state(tmp_path).keys() == target.keys()
