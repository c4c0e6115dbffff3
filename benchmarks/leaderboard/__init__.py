"""A leaderboard of placement planners: fixed loads, one function a planner, every planner in a process of its own."""
