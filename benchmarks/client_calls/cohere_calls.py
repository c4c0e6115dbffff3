"""cohere: reranking, by its second API and its first."""

import os

import cohere

SAY = {"model": "demo", "query": "read a file", "documents": ["def read(", "class File:"], "top_n": 1}


def rerank():
    answer = cohere.ClientV2("none", base_url=os.environ["BASE_URL"]).rerank(**SAY)
    assert len(answer.results) == 1
    assert answer.results[0].relevance_score > 0


def rerank_v1():
    assert len(cohere.Client("none", base_url=os.environ["BASE_URL"]).rerank(**SAY).results) == 1
