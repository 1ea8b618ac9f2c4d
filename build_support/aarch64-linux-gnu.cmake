# Cross-compiles the CPU kernels for aarch64 with Debian's g++-aarch64-linux-gnu:
#   CMAKE_TOOLCHAIN_FILE=build_support/aarch64-linux-gnu.cmake _PYTHON_HOST_PLATFORM=linux-aarch64 pip wheel --no-deps .
# makes a wheel for that platform (scripts/check_wheels.py --aarch64 does, and checks it).
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
