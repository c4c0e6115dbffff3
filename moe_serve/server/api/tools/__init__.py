"""Parsers of what models write: reasoning and tool calls, a file for each format. Pure functions of the text.

Every parser takes text in any pieces and gives the same parts however it was cut. What cannot be understood is content,
as it was written: nothing is lost, and nothing raises.
"""
