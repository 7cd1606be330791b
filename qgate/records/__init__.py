"""Types of plain data, which check the contents of files and generate their schemas."""

from qgate.records.validating import Meta, json_schema, required_fields, validate

__all__ = ["Meta", "json_schema", "required_fields", "validate"]
