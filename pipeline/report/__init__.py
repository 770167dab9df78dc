"""What people look at: timelines, measured and predicted; a schedule assessed; several compared."""
