# `cmake --install`: command, public headers, libraries, and the package for find_package(lockstep).
# Components: command, share (man pages and completions), dev; and portable, which only the tarball has. See packages.cmake.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/lockstep)

# lockstep.h and what it includes, and the C interface; tests/process/install.sh compiles each of them alone.
set(public_headers
  lockstep.h c.h
  base/canonical_tree.h base/deadline.h base/error.h base/hash/blake3.h base/random.h base/range.h base/version.h
  comm/buffer.h comm/call.h comm/communicator.h comm/types.h comm/work.h)
list(TRANSFORM public_headers PREPEND ${CMAKE_SOURCE_DIR}/lockstep/)
target_sources(lockstep_all INTERFACE FILE_SET HEADERS BASE_DIRS ${CMAKE_SOURCE_DIR} FILES ${public_headers})

install(TARGETS lockstep COMPONENT command)
install(FILES ${CMAKE_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} RENAME copyright COMPONENT share)
# Man pages and completions of shells, from the help of the command itself.
install(CODE "execute_process(COMMAND $<TARGET_FILE:lockstep> share ${CMAKE_BINARY_DIR}/share COMMAND_ERROR_IS_FATAL ANY)"
  COMPONENT share)
install(DIRECTORY ${CMAKE_BINARY_DIR}/share/ DESTINATION ${CMAKE_INSTALL_DATADIR} COMPONENT share)
install(TARGETS ${LOCKSTEP_LIBRARIES} lockstep_all EXPORT lockstep-targets
  ARCHIVE COMPONENT dev
  FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT dev)
install(EXPORT lockstep-targets NAMESPACE lockstep:: DESTINATION ${package_dir} COMPONENT dev)
if(TARGET lockstep_shared)
  # The C interface; `make install` goes without where only the command was built.
  install(TARGETS lockstep_shared OPTIONAL LIBRARY COMPONENT command NAMELINK_COMPONENT dev)
  install(TARGETS lockstep_portable COMPONENT portable EXCLUDE_FROM_ALL)
  # Both have libraries of others inside, whose licences want to go with them.
  foreach(package libfmt-dev libsodium-dev libssl-dev libcli11-dev nlohmann-json3-dev)
    install(FILES /usr/share/doc/${package}/copyright DESTINATION ${CMAKE_INSTALL_DOCDIR}/licences RENAME ${package}
      COMPONENT share OPTIONAL)
  endforeach()
endif()

configure_package_config_file(${CMAKE_SOURCE_DIR}/cmake/lockstep-config.cmake.in
  ${CMAKE_BINARY_DIR}/lockstep-config.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/lockstep-config-version.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/lockstep-config.cmake
  ${CMAKE_BINARY_DIR}/lockstep-config-version.cmake DESTINATION ${package_dir} COMPONENT dev)
