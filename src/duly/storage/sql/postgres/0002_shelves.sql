-- What is configured rather than sent: principals, grants, profiles, groups. Each shelf has its own names.
CREATE TABLE duly_items (
    shelf TEXT COLLATE "C" NOT NULL,
    name  TEXT COLLATE "C" NOT NULL,
    body  BYTEA NOT NULL,
    PRIMARY KEY (shelf, name)
);
