#pragma once
#include <netdb.h>
