"""What each rank does, and in which order: written, lowered, simulated and validated as plain data.

Standard library only. Read in this order: `actions`, `schedule`, `library`, `lowering`, `simulate`, `validate`, `grid`.
"""
