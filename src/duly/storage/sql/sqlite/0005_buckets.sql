-- Items lie in buckets, as in other key-value stores.
ALTER TABLE items RENAME COLUMN shelf TO bucket;
