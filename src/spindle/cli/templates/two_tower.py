"""Contrastive training of an image tower and a text tower.

    python {name}                     # one process
    spindle launch -n 2 {name}        # two processes on this machine
    torchrun --nproc-per-node 8 {name}   # one process per GPU
    spindle plan {name} --cluster h100x16   # a plan for machines that you do not have

The data is generated, so that this runs as it is. Places to change are marked with CHANGE.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import spindle

NUM_CLASSES, WIDTH, BATCH_SIZE, STEPS = 64, 64, 32, 60


# CHANGE: your dataset. A map-style dataset that returns a dict of tensors per sample is best: every process then reads
# only the samples that it needs. What a sample is must depend on its index alone, never on the rank.
class Pairs(Dataset):
    """Noisy images of a class, with a sentence that names the class."""

    def __init__(self, size):
        self.size = size
        self.images = torch.randn(NUM_CLASSES, 3, 16, 16, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        label = int(torch.randint(NUM_CLASSES, (), generator=generator))
        noise = torch.randn(3, 16, 16, generator=generator)
        words = torch.randint(100, 200, (12,), generator=generator)
        words[3:6] = label
        return {"pixels": self.images[label] + 0.3 * noise, "words": words}


# CHANGE: your models. Any nn.Module will do; an nn.Sequential or an unmodified Hugging Face model is cut into layers
# that can be placed on different devices.
def block(width):
    return nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)


class Pooled(nn.Module):
    """The mean over positions, projected and normalised."""

    def __init__(self, width):
        super().__init__()
        self.projection = nn.Linear(width, WIDTH)

    def forward(self, hidden):
        return F.normalize(self.projection(hidden.mean(dim=1)), dim=-1)


class Patches(nn.Module):
    """An image as a sequence of embedded patches."""

    def __init__(self, width):
        super().__init__()
        self.embed = nn.Conv2d(3, width, kernel_size=4, stride=4)

    def forward(self, pixels):
        return self.embed(pixels).flatten(2).transpose(1, 2)


class Temperature(nn.Module):
    """CLIP's learned temperature. A parameter that a loss uses lives in a module, too."""

    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, a, b):
        return a @ b.T * self.logit_scale.exp()


torch.manual_seed(0)
vision = spindle.module("vision", nn.Sequential(Patches(64), *(block(64) for _ in range(3)), Pooled(64)))
text = spindle.module("text", nn.Sequential(nn.Embedding(200, 32), *(block(32) for _ in range(2)), Pooled(32)))
# Every sample is compared with every other one: this module needs the whole batch.
temperature = spindle.module("temperature", Temperature(), whole_batch=True)


# CHANGE: your loss. A task is a function from a batch to a loss; several tasks may share modules.
@spindle.task(batch_size=BATCH_SIZE)
def image_text(batch):
    logits = temperature(vision(batch["pixels"]), text(batch["words"]))
    labels = torch.arange(logits.shape[0], device=logits.device)
    loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
    return spindle.result(loss, accuracy=logits.argmax(dim=1) == labels)


# Called on every process with the parameters that it holds.
def make_optimizer(named_parameters):
    return torch.optim.AdamW([parameter for _, parameter in named_parameters], lr=1e-3)


trainer = spindle.Trainer(
    [image_text],
    optimizer=make_optimizer,
    max_grad_norm=1.0,
    run_folder="runs/two-tower",  # what `spindle report runs/two-tower -o step.html` shows
    # checkpoints=spindle.Checkpoints("runs/two-tower", every=500),  # resumes when the script is started again
    # callbacks=[spindle.JSONLines("steps.jsonl")],  # or spindle.TensorBoard("runs")
)
result = trainer.fit({"image_text": Pairs(2048)}, steps=STEPS)
result.print()
