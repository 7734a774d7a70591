"""What a run will need, before any GPU is rented: memory of each rank, time of a step, size and price of the cache.

    shape.py      the model in numbers, and its parameters on a rank
    layout.py     how ranks share the work; layouts that do not divide are refused here
    head.py       what each implementation of the loss costs: bytes, traffic, GEMMs
    memory.py     bytes of a rank, term by term
    step_time.py  seconds of a step, term by term
    cache_cost.py the teacher's cache: to build, to store, and when it has paid for itself
    report.py     configurations side by side, as a table or as JSON
    dry_run.py    the real Megatron model of chosen ranks, without memory: its parameters and head counted exactly
    allocator.py  peak memory of a function, measured or simulated

Every term is a formula with nothing adjusted, but for the two constants of `calibration.py`.
"""
