"""Sharded models of transformers: loading on rank 0 alone, frozen and tied weights, LoRA, a Trainer's loop."""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

from notebook_launcher import Accelerator
from notebook_launcher import FullyShardedDataParallelPlugin as Plugin
from tests.support.toy_training import sessions_fixture, shards_on_cpus
from tests.support.toy_training import whole as copies

if TYPE_CHECKING:
    from pathlib import Path


transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = shards_on_cpus


ranks = sessions_fixture(1, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a small Llama whose output layer is tied to its embedding, of 11 x 8 numbers."""
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(**sizes, **heads, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def load(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path)


def whole(model: Any) -> dict[str, torch.Tensor]:
    found = dict(model.named_parameters())
    return dict(zip(found, copies(found.values()), strict=True))


def load_on_first(path: Path) -> tuple[int, bool, dict[str, torch.Tensor], torch.Tensor]:
    """Load on rank 0 alone; return the numbers that the rank held before `prepare`, and what came of it."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=Plugin())
    if accelerator.is_main_process:
        model = load(path)
    else:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(path))
    num_held = sum(parameter.numel() for parameter in model.parameters() if not parameter.is_meta)
    model = accelerator.prepare(model)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        scores = model(torch.arange(10)[None]).logits
    return num_held, tied, whole(model), scores


def test_weights_that_rank_0_alone_reads_reach_all_ranks(ranks, folder):
    model = load(folder)
    with torch.no_grad():
        expected = model(torch.arange(10)[None]).logits
    results = ranks.run(2, load_on_first, folder)
    assert [held for held, *_ in results] == [sum(parameter.numel() for parameter in model.parameters()), 0]
    for _, tied, weights, scores in results:
        assert tied
        torch.testing.assert_close((scores, weights), (expected, whole(model)))


def test_wish_to_load_on_rank_0_reaches_transformers_until_the_next_accelerator(ranks, folder):
    def ask() -> list[bool]:
        answers = []
        for plugin in (Plugin(cpu_ram_efficient_loading=True), None):
            accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
            answers += [accelerator.is_fsdp2, bool(transformers.integrations.is_fsdp_enabled())]
        return answers

    assert list(ranks.run(2, ask)) == [[True, True, False, False]] * 2


def frozen(model: Any) -> Any:
    """Freeze all but the last block and the norm behind it."""
    model.requires_grad_(False)
    model.model.layers[-1].requires_grad_(True)
    model.model.norm.requires_grad_(True)
    return model


def with_lora(model: Any) -> Any:
    peft: Any = importlib.import_module("peft")
    torch.manual_seed(1)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )


def train(path: Path, change: Any, plugin: Plugin | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train as a Trainer's loop does: `no_sync` in a window, clipping, a scheduler, an evaluation after each update."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = change(load(path))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, lr=0.05)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    tokens, losses = torch.arange(64).view(16, 4) % 11, []
    mine = tokens[accelerator.process_index :: accelerator.num_processes]
    for window in mine.split(2):
        model.train()
        for number, row in enumerate(window):
            is_last = number == len(window) - 1
            with contextlib.nullcontext() if is_last else accelerator.no_sync(model):
                loss = model(input_ids=row[None], labels=row[None]).loss
                accelerator.backward(loss / len(window))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses.append(float(model(input_ids=tokens[:2], labels=tokens[:2]).loss))
    return losses, whole(accelerator.unwrap_model(model))


@pytest.mark.parametrize("change", [frozen, with_lora])
def test_loop_of_a_trainer_gives_the_weights_of_whole_models(ranks, folder, change):
    if change is with_lora:
        pytest.importorskip("peft", reason="peft is not installed")
    losses, weights = ranks.run(2, train, folder, change, None)[0]
    assert losses[-1] < losses[0]
    for mine, shards in ranks.run(2, train, folder, change, Plugin()):
        torch.testing.assert_close(mine, losses)
        assert shards.keys() == weights.keys()
        for name, value in shards.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-6)
