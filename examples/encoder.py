"""Train an encoder that tells which package of Python's standard library 32 bytes are from, with PyTorch alone.

    python examples/encoder.py

``porting.md`` changes a few lines at a time, until it trains on slices, in a pipeline and with ZeRO.
"""

import argparse
import importlib
import logging
import math
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

PACKAGES = ("asyncio", "email", "encodings", "importlib", "json", "logging", "multiprocessing", "unittest")
LENGTH, WIDTH, HEADS, DEPTH = 32, 32, 4, 2
MICRO_BATCH, ACCUMULATION, WARMUP, PATIENCE = 32, 2, 8, 2
log = logging.getLogger("encoder")


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)

    def forward(self, tokens):
        return self.bytes(tokens) + self.positions


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.expand = nn.Linear(WIDTH, 4 * WIDTH)
        self.contract = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden):
        normed = self.attention_norm(hidden)
        parts = (layer(normed).unflatten(-1, (-1, WIDTH // HEADS)) for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in parts)).transpose(1, 2).flatten(2)
        hidden = hidden + self.projection(mixed)
        return hidden + self.contract(F.gelu(self.expand(self.mlp_norm(hidden))))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.classes = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(PACKAGES))

    def forward(self, hidden):
        return self.classes(self.norm(hidden).mean(1))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = Embedding(), Head()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def loss_of(scores, labels):
    return F.cross_entropy(scores.float(), labels)


def warm_up(step):
    return min(1.0, (step + 1) / WARMUP)


def data_set(number, seed):
    """Draw windows of the packages' sources, and the number of the package of each."""
    folders = [Path(importlib.import_module(name).__file__).parent for name in PACKAGES]
    texts = [b"".join(path.read_bytes() for path in sorted(folder.rglob("*.py"))) for folder in folders]
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(PACKAGES), (number,), generator=draw)
    places = [int(torch.randint(len(texts[label]) - LENGTH, (), generator=draw)) for label in labels]
    windows = [list(texts[label][place : place + LENGTH]) for label, place in zip(labels, places, strict=True)]
    return TensorDataset(torch.tensor(windows), labels)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("runs/encoder"))
    parser.add_argument("--resume", type=Path, help="a folder in --out, such as runs/encoder/epoch2")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logging.basicConfig(format="%(message)s", level=logging.INFO)

    torch.manual_seed(0)
    model = Encoder().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)

    train, validation = data_set(512, seed=1), data_set(256, seed=2)
    order = torch.Generator()
    loader = DataLoader(train, MICRO_BATCH, sampler=RandomSampler(train, generator=order), drop_last=True)
    validation_loader = DataLoader(validation, MICRO_BATCH)

    state = {"epoch": 0, "best": math.inf, "scheduler": scheduler.state_dict()}
    if arguments.resume:
        weights, moments = get_state_dict(model, optimizer)
        saved = {"app": {"model": weights, "optim": moments}, "state": state}
        dcp.load(saved, checkpoint_id=arguments.resume, no_dist=True)
        scheduler.load_state_dict(state["scheduler"])
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)

    worse = 0
    for epoch in range(state["epoch"], arguments.epochs):
        model.train()
        order.manual_seed(epoch)
        started, losses = time.perf_counter(), []
        for number, (tokens, labels) in enumerate(loader, start=1):
            with torch.autocast(device.type, torch.bfloat16):
                loss = loss_of(model(tokens.to(device)), labels.to(device))
            (loss / ACCUMULATION).backward()
            losses.append(loss.detach())
            if number % ACCUMULATION == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        training_loss = torch.stack(losses).mean().item()
        tokens = len(loader) * loader.batch_size * LENGTH
        speed = tokens / (time.perf_counter() - started)

        model.eval()
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            losses = [loss_of(model(tokens.to(device)), labels.to(device)) for tokens, labels in validation_loader]
        validation_loss = torch.stack(losses).mean().item()
        log.info("epoch %d: %.4f, validation %.4f, %.0f tokens/s", epoch, training_loss, validation_loss, speed)

        worse = 0 if validation_loss < state["best"] else worse + 1
        if worse == PATIENCE:
            break
        if worse == 0:
            state = {"epoch": epoch + 1, "best": validation_loss, "scheduler": scheduler.state_dict()}
            weights, moments = get_state_dict(model, optimizer)
            saved = {"app": {"model": weights, "optim": moments}, "state": state}
            dcp.save(saved, checkpoint_id=arguments.out / f"epoch{epoch}", no_dist=True)


if __name__ == "__main__":
    main()
