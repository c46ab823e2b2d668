"""Several tasks in one step: image classification, image-text and audio-text retrieval, with shared encoders.

    python {name}                     # one process
    spindle launch -n 4 {name}        # four processes on this machine
    torchrun --nproc-per-node 8 {name}   # one process per GPU
    spindle plan {name} --cluster h100x16   # a plan for machines that you do not have

The data is generated, so that this runs as it is. Places to change are marked with CHANGE.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import spindle

NUM_CLASSES, STEPS = 16, 60
SHAPES = {"pixels": (48,), "sound": (96,), "words": (24,)}


# CHANGE: your datasets, one for each task. What a sample is must depend on its index alone, never on the rank.
class Samples(Dataset):
    """Noisy vectors of a class, in several modalities."""

    def __init__(self, size, *modalities):
        self.size, self.modalities = size, modalities
        generator = torch.Generator().manual_seed(1)
        self.means = {name: torch.randn(NUM_CLASSES, *shape, generator=generator) for name, shape in SHAPES.items()}

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        label = torch.randint(NUM_CLASSES, (), generator=generator)
        noise = {name: torch.randn(SHAPES[name], generator=generator) for name in self.modalities}
        return {name: self.means[name][label] + 0.3 * noise[name] for name in self.modalities} | {"label": label}


# CHANGE: your encoders. Their sizes and loads may differ: that is what plans are for.
def encoder(inputs, width, depth):
    blocks = (nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(depth))
    return nn.Sequential(nn.Linear(inputs, width), *blocks, nn.Linear(width, 64))


torch.manual_seed(0)
vision = spindle.module("vision", encoder(48, 256, 6))
audio = spindle.module("audio", encoder(96, 128, 3))
text = spindle.module("text", encoder(24, 128, 4))
classifier = spindle.module("classifier", nn.Linear(64, NUM_CLASSES))


def contrastive(a, b):
    logits = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T / 0.1
    return F.cross_entropy(logits, torch.arange(logits.shape[0], device=logits.device))


# The mean of one loss for each sample: it is computed in parts on several devices.
@spindle.task(batch_size=48, per_sample_mean=True)
def classify(batch):
    logits = classifier(vision(batch["pixels"]))
    loss = F.cross_entropy(logits, batch["label"])
    return spindle.result(loss, accuracy=logits.argmax(dim=1) == batch["label"])


# A contrastive loss compares all samples of the batch: it is computed over the whole batch, its encoders are not.
@spindle.task(batch_size=32)
def image_text(batch):
    return contrastive(vision(batch["pixels"]), text(batch["words"]))


@spindle.task(batch_size=32, weight=0.5)
def audio_text(batch):
    return contrastive(audio(batch["sound"]), text(batch["words"]))


# Called on every process with the parameters that it holds.
def make_optimizer(named_parameters):
    return torch.optim.AdamW([parameter for _, parameter in named_parameters], lr=1e-3)


trainer = spindle.Trainer(
    [classify, image_text, audio_text],
    optimizer=make_optimizer,
    lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    # sampling_weights={"classify": 2, "image_text": 1, "audio_text": 1},  # a step then draws tasks
    run_folder="runs/multitask",  # what `spindle report runs/multitask -o step.html` shows
    # checkpoints=spindle.Checkpoints("runs/multitask", every=500),  # resumes when the script is started again
    # callbacks=[spindle.JSONLines("steps.jsonl")],  # or spindle.TensorBoard("runs")
)
loaders = {
    "classify": Samples(4096, "pixels"),
    "image_text": Samples(4096, "pixels", "words"),
    "audio_text": Samples(2048, "sound", "words"),
}
result = trainer.fit(loaders, steps=STEPS)
result.print()
