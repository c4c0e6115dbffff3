"""Plugs our placement planner into other engines: each module is one engine's own extension point.

An engine that has this package installed is not changed by it: an adapter acts only where MOE_SERVE_EPLB names a
policy. Nothing here loads torch or the engine before the engine calls.
"""
