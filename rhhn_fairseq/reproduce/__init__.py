"""The papers' tables from one command: prepare, train, evaluate, record, compare."""
