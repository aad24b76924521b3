"""Writes a small model and its tokenizer, as from a hub; arguments: folder, what it is for."""

import sys

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(57))]


def make(purpose: str):
    torch.manual_seed(0)
    if purpose == "run_glue":
        size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
        size |= {"vocab_size": len(WORDS), "intermediate_size": 32, "num_labels": 3}
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return BertForSequenceClassification(BertConfig(**size, **dropout))
    size = {"vocab_size": len(WORDS), "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**size, **dropout, bos_token_id=1, eos_token_id=1))


if __name__ == "__main__":
    folder, purpose = sys.argv[1:]
    make(purpose).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    made = PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=16, **names)
    made.save_pretrained(folder)
