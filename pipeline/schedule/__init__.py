"""What each rank does, and in which order: written, lowered, simulated and validated as plain data.

Standard library only. Read in this order: `actions`, `schedule`, `library`, `lowering`, `costs`, `simulate`,
`validate`, `grid`; then what `simulate` rests on: `events`, `idle`, `memory`, `deadlock`; and `torch_csv`.
"""
