"""The section of the configuration for the HTTP front end, and for the address where ranks attach to it."""

from typing import Self

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from moe_serve.config.section import Section


class ServerConfig(Section):
    """The HTTP front end, and the address where workers attach to it."""

    host: str = "127.0.0.1"
    port: NonNegativeInt = Field(default=30000, le=65535)
    worker_host: str = "127.0.0.1"  # where workers reach the front end
    worker_port: NonNegativeInt = Field(default=30001, le=65535)
    max_body_mib: PositiveFloat = 16.0  # a larger HTTP body is refused
    attach_deadline_s: PositiveFloat = 600.0  # how long the front end waits for all ranks at start
    # A rank ends when the front end is silent for longer than this. A rank is lost when it is silent for longer than
    # this and than engine.step_deadline_s.
    worker_deadline_s: PositiveFloat = 30.0
    routing_load_gap: NonNegativeFloat = 512.0  # prefix and session affinity yield above this gap, in tokens
    health_deadline_s: PositiveFloat = 20.0  # how long /health_generate waits for a token of every rank

    @model_validator(mode="after")
    def _two_ports(self) -> Self:
        if self.port and self.port == self.worker_port:
            raise ValueError(f"port and worker_port are both {self.port}; give them different values")
        return self
