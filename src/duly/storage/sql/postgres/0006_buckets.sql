-- Items lie in buckets, as in other key-value stores.
ALTER TABLE duly_items RENAME COLUMN shelf TO bucket;
