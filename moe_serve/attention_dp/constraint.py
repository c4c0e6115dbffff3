"""What the whole output of a request must match. Torch-free."""

from dataclasses import dataclass

from moe_serve.errors import RequestError

KINDS = ("json_schema", "regex", "choice", "grammar", "structural_tag", "compiled")
MAX_CHARS = 1 << 18  # of a constraint's text


@dataclass(frozen=True)
class Constraint:
    """The output is a text of this form, from its first token to its last.

    kind: how `text` is meant:
          json_schema     a JSON schema, as JSON
          regex           a regular expression, which the whole output matches (Rust's syntax, without look-around)
          choice          a JSON list of strings, one of which is the output
          grammar         a context-free grammar: EBNF as of llama.cpp (`root ::= ...`), or Lark (`start: ...`)
          structural_tag  free text in which triggers begin parts of a schema, as JSON of SGLang
          compiled        what a front end has made of one of these, for ranks only
    """

    kind: str
    text: str

    def validate(self) -> None:
        """Raises RequestError for what cannot be a constraint. Whether its text is sound, a compiler says."""
        if self.kind not in KINDS:
            raise RequestError(f"constraint.kind is {self.kind!r}, expected one of {', '.join(KINDS)}", "constraint")
        if not isinstance(self.text, str) or not self.text:
            raise RequestError(f"{self.kind} is {self.text!r:.60}, expected a text that is not empty", self.kind)
        if len(self.text) > MAX_CHARS and self.kind != "compiled":
            raise RequestError(
                f"{self.kind} has {len(self.text)} characters, at most {MAX_CHARS} are taken; send a smaller one",
                self.kind,
            )
