"""What commands and blocks import: imported once, by the process that they are forked from."""

import optuna
import PIL.Image
import pyarrow.parquet
import tensorboardX
import tokenizers
import torch
import torch.distributed.fsdp
import torch.utils.data

import shoal
import shoal.api
import shoal.data.loader
import shoal.data.pack.writer
import shoal.data.sources.find
import shoal.planner.search.ranking
import shoal.profile.config
import shoal.report.summary
import shoal.tasks.map
import shoal.training.verify

__all__ = ["PIL", "optuna", "pyarrow", "shoal", "tensorboardX", "tokenizers", "torch"]
