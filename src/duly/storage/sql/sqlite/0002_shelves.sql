-- What is configured rather than sent: principals, grants, profiles, groups. Each shelf has its own names.
CREATE TABLE items (
    shelf TEXT NOT NULL,
    name  TEXT NOT NULL,
    body  BLOB NOT NULL,
    PRIMARY KEY (shelf, name)
) WITHOUT ROWID;
