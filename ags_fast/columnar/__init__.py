"""What Parquet files are made of, encrypted or not: Thrift's protocol, the tree of a schema, the levels of pages."""
