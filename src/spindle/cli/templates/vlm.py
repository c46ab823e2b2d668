"""Fine-tuning of a vision-language model: a Hugging Face LLaVA, built from a config with random weights.

    pip install 'spindle-train[hf]'
    python {name}                     # one process
    spindle launch -n 2 {name}        # two processes on this machine
    torchrun --nproc-per-node 8 {name}   # one process per GPU
    spindle plan {name} --cluster h100x16   # a plan for machines that you do not have

The data is generated, so that this runs as it is. Places to change are marked with CHANGE.
"""

import torch
from torch.utils.data import Dataset
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

import spindle

IMAGE, COLOUR, NUM_COLOURS, VOCABULARY = 1, 10, 8, 64
NUM_PATCHES, BATCH_SIZE, STEPS = 16, 8, 40


# CHANGE: your dataset, or a DataLoader with the collator of your processor. What a sample is must depend on its index
# alone, never on the rank.
class Pictures(Dataset):
    """Images of one colour; the answer names it."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        colour = int(torch.randint(NUM_COLOURS, (), generator=generator))
        rgb = torch.tensor([float(colour >> bit & 1) for bit in range(3)])
        pixels = 2 * rgb[:, None, None] - 1 + 0.1 * torch.randn(3, 32, 32, generator=generator)
        question = torch.randint(20, VOCABULARY, (5,), generator=generator)
        tokens = torch.cat([torch.full((NUM_PATCHES,), IMAGE), question, torch.tensor([COLOUR + colour, 2])])
        labels = tokens.clone()
        labels[: NUM_PATCHES + 5] = -100  # the loss counts the answer alone
        return {"pixel_values": pixels, "input_ids": tokens, "labels": labels}


# CHANGE: your model, for example LlavaForConditionalGeneration.from_pretrained(...).
torch.manual_seed(0)
config = LlavaConfig(
    vision_config=CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, image_size=32, patch_size=8
    ),
    text_config=LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
    ),
    image_token_index=IMAGE,
    vision_feature_layer=-1,
)
model = LlavaForConditionalGeneration(config)

# The model is opened: its vision tower, projector and language model are planned as modules of their own.
llava = spindle.module("llava", model)


@spindle.task(batch_size=BATCH_SIZE, tokens=lambda batch: batch["input_ids"].numel())
def answer(batch):
    return llava(**batch).loss


# Called on every process with the parameters that it holds; freeze the vision tower with model.…requires_grad_(False).
def make_optimizer(named_parameters):
    return torch.optim.AdamW([parameter for _, parameter in named_parameters], lr=1e-3)


trainer = spindle.Trainer(
    [answer],
    optimizer=make_optimizer,
    max_grad_norm=1.0,
    # autocast=torch.bfloat16,
    run_folder="runs/vlm",  # what `spindle report runs/vlm -o step.html` shows
    # checkpoints=spindle.Checkpoints("runs/vlm", every=500),  # resumes when the script is started again
)
result = trainer.fit({"answer": Pictures(1024)}, steps=STEPS)
result.print()
# Afterwards the model holds the trained weights on rank 0:
# if trainer.rank == 0:
#     model.save_pretrained("fine-tuned")
