"""Tiny models on shared cores: one thread each, or threads wait for one another longer than they compute."""

import torch

torch.set_num_threads(1)
