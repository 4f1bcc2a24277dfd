# `cmake --install`: command, public headers, static libraries, and the package for find_package(lockstep).
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/lockstep)

# lockstep.h and what it includes; tests/process/install.sh compiles each of them alone.
set(public_headers
  lockstep.h
  base/canonical_tree.h base/deadline.h base/error.h base/hash/blake3.h base/random.h base/range.h base/version.h
  comm/buffer.h comm/call.h comm/communicator.h comm/types.h comm/work.h)
list(TRANSFORM public_headers PREPEND ${CMAKE_SOURCE_DIR}/lockstep/)
target_sources(lockstep_all INTERFACE FILE_SET HEADERS BASE_DIRS ${CMAKE_SOURCE_DIR} FILES ${public_headers})

install(TARGETS lockstep)
# Man pages and completions of shells, from the help of the command itself.
install(CODE "execute_process(COMMAND $<TARGET_FILE:lockstep> share ${CMAKE_BINARY_DIR}/share COMMAND_ERROR_IS_FATAL ANY)")
install(DIRECTORY ${CMAKE_BINARY_DIR}/share/ DESTINATION ${CMAKE_INSTALL_DATADIR})
install(TARGETS ${LOCKSTEP_LIBRARIES} lockstep_all EXPORT lockstep-targets
  FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT lockstep-targets NAMESPACE lockstep:: DESTINATION ${package_dir})

configure_package_config_file(${CMAKE_SOURCE_DIR}/cmake/lockstep-config.cmake.in
  ${CMAKE_BINARY_DIR}/lockstep-config.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/lockstep-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/lockstep-config.cmake
  ${CMAKE_BINARY_DIR}/lockstep-config-version.cmake DESTINATION ${package_dir})
