"""Knowledge distillation inside Megatron-Core: offline top-K targets and a fused, chunked, vocabulary-parallel KL loss."""
