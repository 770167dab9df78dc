"""The search behind `zb_auto`: orders written by greedy rules under a ladder of memory caps, then improved.

Read in this order: `problem`, `greedy`, `timing`, `improve`, `candidates`.
"""
