"""The two constants that no data sheet gives, shared by every configuration.

Both are least squares of the relative errors over the paper's four 8K runs, its "GB" read as GiB (18 bytes for each
of 3.21·10⁹ parameters are 57.8·10⁹ bytes: 58.3·10⁹ would leave nothing for the rest). `python tools/plan_paper.py`
fits them again and prints what is left over, there and on the 32K runs, which took no part.
"""

EFFICIENCY = 0.526  # share of the peak FLOP/s, memory and link bandwidths that a run sustains
OVERHEAD_BYTES = 2.62 * 2**30  # libraries' workspaces and what the allocator cannot use
