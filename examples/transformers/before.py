"""A LLaVA that learns to name the colour of a picture.

The model is a folder that `from_pretrained` reads; `make_model.py` writes a tiny one with random weights. The dataset
is made here.

    python examples/transformers/make_model.py tiny-llava
    python examples/transformers/before.py tiny-llava           # transformers.Trainer
    spindle launch -n 2 examples/transformers/after.py tiny-llava
"""

import sys

import numpy
import transformers as hf
from datasets import Dataset

FOLDER = sys.argv[1]
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}

model = hf.LlavaForConditionalGeneration.from_pretrained(FOLDER)
processor = hf.AutoProcessor.from_pretrained(FOLDER)
dataset = Dataset.from_dict({"colour": [list(COLOURS)[number * 7 % 11 % 4] for number in range(64)]})


def collate(samples):
    colours = [sample["colour"] for sample in samples]
    images = [numpy.full((32, 32, 3), COLOURS[colour], dtype=numpy.uint8) for colour in colours]
    texts = [f"<image> the colour is {colour}" for colour in colours]
    batch = processor(images=images, text=texts, return_tensors="pt", padding=True)
    labels = batch["input_ids"].clone()
    labels[:, :-1] = -100  # only the colour is learnt
    return {**batch, "labels": labels}


arguments = hf.TrainingArguments(
    output_dir=f"{FOLDER}-trained",
    per_device_train_batch_size=8,
    max_steps=20,
    learning_rate=2e-3,
    lr_scheduler_type="cosine",
    weight_decay=0.01,
    train_sampling_strategy="sequential",
    dataloader_num_workers=1,
    remove_unused_columns=False,
    logging_steps=1,
    save_strategy="no",
)
trainer = hf.Trainer(model, arguments, train_dataset=dataset, data_collator=collate)
trainer.train()
model.save_pretrained(arguments.output_dir)
